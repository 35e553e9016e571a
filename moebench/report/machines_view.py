"""The machines of a run: every parameter with its value, range, status and source."""

from collections import Counter
from collections.abc import Iterable

from moebench.claims.words import listed
from moebench.report.parts import Table, number
from moebench.workloads.machine import Curve, Parameter, Topology
from moebench.workloads.parameters import HARDWARE_SPECS, LINK_SPECS

COLUMNS = ["parameter", "what it is", "value", "range", "status", "source"]


def machine_tables(topologies: Iterable[Topology]) -> list[dict]:
    """One entry a kind of node: its parameters, and the sizes in which it was used."""
    kinds: dict[tuple, list[Topology]] = {}
    for topology in topologies:
        key = (topology.hardware.name, topology.title, tuple(topology.link_parameters.items()))
        kinds.setdefault(key, []).append(topology)
    return [_entry(kind) for kind in kinds.values()]


def machines_sentence(topologies: Iterable[Topology]) -> str:
    """How many parameters there are, and what they rest on."""
    parameters = {
        (t.hardware.name, name): p.status for t in topologies for name, p in t.parameters().items()
    }
    counts = Counter(parameters.values())
    parts = [f"{count} {status}" for status, count in counts.most_common()]
    return (
        f"Every number of the machines, with where it comes from: {listed(parts) if parts else 'none'}. A range is "
        "what the draws cover; a datasheet value has none."
    )


def _entry(kind: list[Topology]) -> dict:
    first = kind[0]
    sizes = listed([f"{t.nodes}x{t.gpus_per_node}" for t in kind])
    rows = [
        [name, meaning(name), _shown(p.value, p), _range(p), p.status, p.source]
        for name, p in sorted(first.parameters().items())
    ]
    rows += [
        [f"curve {name}", *_curve(curve), "–", curve.status, curve.source]
        for name, curve in sorted(first.hardware.curves.items())
    ]
    return {
        "title": f"{first.hardware.title}: {sizes} ({first.title})",
        "notes": [*first.hardware.notes, *first.notes],
        "table": Table(COLUMNS, rows, f"Parameters of {first.hardware.title}", frozenset(["value", "range"])),
    }


def meaning(name: str) -> str:
    """What a parameter is, in words."""
    spec = HARDWARE_SPECS.get(name) or LINK_SPECS.get(name)
    return spec.meaning if spec else ""


def _curve(curve: Curve) -> tuple[str, str]:
    """What it is, from the smallest to the largest work, and its ends: `0.100 to 0.850`."""
    ends = dict.fromkeys([(curve.at[0], curve.share[0]), (curve.at[-1], curve.share[-1])])
    sizes = " to ".join(number(at) for at, _ in ends)
    return f"share of the peak rate, with work of {sizes}", " to ".join(number(share) for _, share in ends)


def _shown(value: float, parameter: Parameter) -> str:
    unit = "" if parameter.unit in ("", "1") else f" {parameter.unit}"
    return f"{number(value / parameter.scale)}{unit}"


def _range(parameter: Parameter) -> str:
    if not parameter.is_uncertain:
        return "–"
    return f"{number(parameter.low / parameter.scale)} to {_shown(parameter.high, parameter)}"
