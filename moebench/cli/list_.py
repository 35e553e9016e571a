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
    """Systems, with where their technique comes from."""
    from moebench.systems.registry import systems as registered

    return [{"name": name, "title": s.title, "source": s.source} for name, s in registered().items()]


def gates() -> Entries:
    """Routing rules."""
    from moebench.workloads.gates.registry import GATES

    return [
        {"name": name, "title": g.title, "formula": g.formula, "default_top_k": g.default_top_k}
        for name, g in GATES.items()
    ]


def kernels() -> Entries:
    """Kernels and their implementations."""
    from moebench.kernels.registry import KERNELS

    return [
        {"name": name, "implementations": list(kernel.implementations), "formula": kernel.formula}
        for name, kernel in KERNELS.items()
    ]


def topologies() -> Entries:
    """Topologies that files list; other sizes of the same node types load as well."""
    from moebench.workloads.load import load_topology, topology_names

    loaded = [load_topology(name) for name in topology_names() if _is_there(load_topology, name)]
    return [{"name": t.name, "title": t.title, "ranks": t.ranks, "hardware": t.hardware.name} for t in loaded]


def hardware() -> Entries:
    """Hardware."""
    from moebench.workloads.load import hardware_names, load_hardware

    loaded = [load_hardware(name) for name in hardware_names()]
    return [{"name": h.name, "title": h.title, "kind": h.kind, "parameters": len(h.parameters)} for h in loaded]


def claims() -> Entries:
    """Reported numbers of every paper."""
    from moebench.claims.reported import claims_of, papers
    from moebench.claims.why import reported

    return [
        {"name": c.id, "paper": c.paper, "experiment": c.experiment, "reported": reported(c), "evidence": c.evidence}
        for paper in papers()
        for c in claims_of(paper)
    ]


def figures() -> Entries:
    """Figures of papers that a suite redraws."""
    from moebench.workloads.load import load_suite, suite_names

    return [
        {"name": f"{suite.name}/{e.name}", "title": e.title, "question": e.question}
        for suite in map(load_suite, suite_names())
        for e in suite.experiments
        if e.figure
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


KINDS: dict[str, Callable[[], Entries]] = {
    kind.__name__: kind for kind in (suites, systems, gates, kernels, topologies, hardware, claims, figures)
}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--json", "as_json", is_flag=True, help="One JSON document: a list of objects with `name`.")
def command(kind: str, as_json: bool) -> None:
    """List what there is of KIND."""
    from moebench.cli.tables import print_json, print_table

    entries = KINDS[kind]()
    if as_json:
        print_json(entries)
    elif entries:
        columns = list(entries[0])
        print_table(columns, [[_text(entry[column]) for column in columns] for entry in entries])
    else:
        click.echo(f"no {kind}")


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
