"""`moebench list`: what there is, by kind. Each kind is a function that returns objects with a `name`."""

from collections.abc import Callable
from typing import Any

import click

Entries = list[dict[str, Any]]


def suites() -> Entries:
    """Suites, with the paper and the experiments."""
    from moebench.workloads.load import load_suite, suite_names

    return [
        {"name": s.name, "title": s.title, "paper": s.paper, "experiments": [e.name for e in s.experiments]}
        for s in map(load_suite, suite_names())
    ]


def systems() -> Entries:
    """Systems, with where their technique comes from; of other packages' also those that can't be used, and why."""
    from moebench.cli.left_out import tell_left_out
    from moebench.plugins import vet
    from moebench.systems import job_registry, model_registry, registry

    vet(registry.names())
    tell_left_out()
    found = [
        {"name": name, "title": s.title, "runs": "layers", "package": registry.package_of(name) or "moebench",
         "source": s.source}
        for name, s in registry.systems().items()
    ]  # fmt: skip
    known = {entry["name"] for entry in found}
    for runs, other in (("models", model_registry), ("training jobs", job_registry)):
        for name in other.NAMES:
            if name not in known:
                one = other.get(name)  # type: ignore[attr-defined]
                found.append({"name": name, "title": one.title, "runs": runs, "package": "moebench",
                              "source": one.source})  # fmt: skip
    return found


def gates() -> Entries:
    """Routing rules."""
    from moebench.workloads.gates.registry import GATES

    return [
        {"name": name, "title": g.title, "formula": f"{g.formula}; w = {g.weight}", "default_top_k": g.default_top_k}
        for name, g in GATES.items()
    ]


def kernels() -> Entries:
    """Kernels, their implementations, and where each runs."""
    from moebench.kernels.registry import KERNELS
    from moebench.workloads.kernel_calls import devices_of, implementations_of

    return [
        {
            "name": name,
            "implementations": list(implementations_of(name)),
            "devices": {which: list(devices_of(name, which)) for which in implementations_of(name)},
            "formula": kernel.formula,
        }
        for name, kernel in KERNELS.items()
    ]


def exchanges() -> Entries:
    """Exchanges between all ranks, and what a node sends to others in one of them."""
    from moebench.workloads.exchange import EXCHANGES, MESSAGES

    return [{"name": name, "what": what, "messages": MESSAGES[name]} for name, what in EXCHANGES.items()]


def parts() -> Entries:
    """Parts of a layer or a step, the ways to do each, and the sizes that it takes."""
    from moebench.workloads.part import PARTS

    return [
        {"name": name, "what": part.what, "systems": list(part.systems), "sizes": list(part.sizes)}
        for name, part in PARTS.items()
    ]


def topologies() -> Entries:
    """Topologies that files list; other sizes of the same node types load as well, up to `max_nodes`."""
    from moebench.workloads.load import load_topology, most_nodes, topology_names

    loaded = [load_topology(name) for name in topology_names() if _is_there(load_topology, name)]
    return [
        {
            "name": t.name,
            "title": t.title,
            "ranks": t.ranks,
            "hardware": t.hardware.name,
            "max_nodes": most_nodes(t.node_type),
        }
        for t in loaded
    ]


def hardware() -> Entries:
    """Hardware."""
    from moebench.workloads.load import hardware_names, load_hardware

    loaded = [load_hardware(name) for name in hardware_names()]
    return [{"name": h.name, "title": h.title, "kind": h.kind, "parameters": len(h.parameters)} for h in loaded]


def models() -> Entries:
    """Models whose MoE layer suites may take."""
    from moebench.workloads.load import load_model, model_names

    return [
        {
            "name": m.name, "title": m.title, "gate": m.gate, "experts": m.experts, "d_model": m.d_model,
            "d_ffn": m.d_ffn, "activation": m.activation, "dtype": m.dtype, "source": m.source,
        }
        for m in map(load_model, model_names())
    ]  # fmt: skip


def claims() -> Entries:
    """Reported numbers of every paper."""
    from moebench.claims.reported import claims_of, papers
    from moebench.claims.why import reported
    from moebench.claims.words import claim_words

    return [
        {
            "name": c.id,
            "paper": c.paper,
            "experiment": c.experiment,
            "claim": claim_words(c),
            "reported": reported(c),
            "evidence": c.evidence,
            "where": f"{c.where} ({c.note})" if c.is_independent else c.where,
        }
        for paper in papers()
        for c in claims_of(paper)
    ]


def figures() -> Entries:
    """Figures of papers: what the paper published of each, and whether it is drawn."""
    from moebench.workloads.load import load_suite, suite_names

    return [
        {
            "name": f"{suite.name}/{figure.name}",
            "suite": suite.name,
            "number": figure.number,
            "title": figure.title,
            "published": figure.published,
            "experiment": figure.experiment or "not drawn",
        }
        for suite in map(load_suite, suite_names())
        for figure in suite.figures
    ]


def _is_there(load: Callable[[str], Any], name: str) -> bool:
    """This machine is listed once it has been measured."""
    from moebench.workloads.errors import InputError
    from moebench.workloads.places import ON_THIS_MACHINE

    try:
        load(name)
    except InputError:
        if name.endswith(ON_THIS_MACHINE):
            return False
        raise
    return True


OF_A_SUITE = {"claims": "paper", "figures": "suite"}  # kinds that --suite narrows, by which key

KINDS: dict[str, Callable[[], Entries]] = {
    kind.__name__: kind
    for kind in (suites, systems, gates, kernels, exchanges, parts, models, topologies, hardware, claims, figures)
}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--suite", metavar="NAME", help="Only claims or figures of this suite.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: a list of objects with `name`.")
def command(kind: str, suite: str | None, as_json: bool) -> None:
    """List what there is of KIND."""
    from moebench.cli.tables import print_json, print_table

    entries = KINDS[kind]()
    if suite is not None:
        entries = _of_suite(entries, kind, suite)
    if as_json:
        print_json(entries)
    elif entries:
        columns = list(entries[0])
        print_table(columns, [[_text(entry[column]) for column in columns] for entry in entries])
    else:
        click.echo(f"no {kind}")


def _of_suite(entries: Entries, kind: str, suite: str) -> Entries:
    from moebench.workloads.errors import InputError, one_of
    from moebench.workloads.load import suite_names

    if kind not in OF_A_SUITE:
        raise InputError(f"--suite narrows {' and '.join(OF_A_SUITE)}; {kind} belong to no suite")
    key = OF_A_SUITE[kind]
    known = sorted({*suite_names(), *(entry[key] for entry in entries)})
    if suite not in known:
        raise one_of("suite", suite, known)
    return [entry for entry in entries if entry[key] == suite]


def _text(value: Any) -> str:
    if isinstance(value, dict):  # where each name runs: most of them in the same places
        usual = max(value.values(), key=list(value.values()).count)
        unusual = [f"{name}: {' and '.join(places)}" for name, places in value.items() if places != usual]
        return "; ".join([*unusual, f"{'others' if unusual else 'all'}: {' and '.join(usual)}"])
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
