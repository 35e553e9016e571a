"""The machines of a run: every parameter with its value, range, status and source."""

from collections import Counter
from collections.abc import Iterable

from moebench.report.parts import Table, listed, number
from moebench.workloads.machine import Parameter, Topology

COLUMNS = ["parameter", "value", "range", "status", "source"]


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
        [name, _shown(p.value, p), _range(p), p.status, p.source] for name, p in sorted(first.parameters().items())
    ]
    return {
        "title": f"{first.hardware.title}: {sizes} ({first.title})",
        "notes": [*first.hardware.notes, *first.notes],
        "table": Table(COLUMNS, rows, f"Parameters of {first.hardware.title}", frozenset(["value", "range"])),
    }


def _shown(value: float, parameter: Parameter) -> str:
    unit = "" if parameter.unit in ("", "1") else f" {parameter.unit}"
    return f"{number(value / parameter.scale)}{unit}"


def _range(parameter: Parameter) -> str:
    if not parameter.is_uncertain:
        return "–"
    return f"{number(parameter.low / parameter.scale)} to {_shown(parameter.high, parameter)}"
