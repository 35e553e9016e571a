"""`moebench explain`: where the time of a case goes, or what makes the difference between two cases."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from moebench.explain import Breakdown, Comparison, OperatorPart, RegionPart

SHOWN_S = 0.5e-6  # shorter times would be written as 0.000 ms


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("case")
@click.argument("other", required=False, metavar="[CASE]")
@click.option("--top", default=12, show_default=True, type=click.IntRange(1), help="Operators to list.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(run: Path, case: str, other: str | None, top: int, as_json: bool) -> None:
    """Say where each millisecond of CASE of the run folder RUN goes; of two cases, what makes the difference.

    CASE is a case's name, or a part of it that no other case has.
    """
    from moebench.cli.tables import print_json
    from moebench.explain import compare

    first = taken_apart(run, case)
    found = compare(first, taken_apart(run, other)) if other else first
    if as_json:
        print_json(_document(found))
    else:
        _show(found, top)


def taken_apart(run: Path, name: str) -> "Breakdown":
    """The breakdown of one case of a run."""
    from moebench.explain import breakdown
    from moebench.sim.recorded import load_case

    recorded = load_case(run, name)
    replay = recorded.replayed()
    return breakdown(recorded.case.name, recorded.programs, replay, recorded.moved_by(replay.step_time_s))


def _show(found: "Breakdown | Comparison", top: int) -> None:
    from rich.console import Console

    from moebench.cli.tables import PIPE_WIDTH
    from moebench.explain import Breakdown
    from moebench.explain_words import difference_words, words

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    sentences = words(found) if isinstance(found, Breakdown) else difference_words(found)
    for sentence in sentences:
        console.print(sentence, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    console.print()
    if isinstance(found, Breakdown):
        _print_parts(console, "region", found.regions, found)
        _print_parts(console, "operator", found.operators[:top], found)
        _print_rest(console, len(found.operators) - top)
    else:
        _print_differences(console, found, top)
        _print_rest(console, len(found.operators) - top)


def _print_parts(
    console: "Console", title: str, parts: "tuple[RegionPart | OperatorPart, ...]", whole: "Breakdown"
) -> None:
    """Compute, exposed communication, host and share of each part."""
    from moebench.explain import OperatorPart
    from moebench.quantities import amount

    table = _table(title, "time", "share", "operators", "exposed", "host", *_counts(title))
    for part in parts:
        cells = [_ms(part.time_s), _percent(part.time_s, whole.step_s)]
        cells += [_ms(part.compute_s), _ms(part.exposed_s), _ms(part.host_s)]
        label = part.region
        if isinstance(part, OperatorPart):
            label = f"{part.name}  {part.region}, {part.phase}"
            moved = amount(part.sent_bytes, "B") if part.sent_bytes else amount(part.device_bytes, "B")
            cells += [str(part.calls), amount(part.flops, "FLOP") if part.flops else "", moved, _bound(part)]
        table.add_row(label, *cells)
    console.print(table)
    console.print()


def _counts(title: str) -> tuple[str, ...]:
    return ("calls", "FLOPs", "bytes", "bound by") if title == "operator" else ()


def _print_differences(console: "Console", found: "Comparison", top: int) -> None:
    """Regions, then operators, with both times."""
    console.print(f"A = {found.first.case}\nB = {found.second.case}", highlight=False, markup=False)
    console.print()
    for title, differences in (("region", found.regions), ("operator", found.operators[:top])):
        table = _table(title, "A", "B", "A less B", "share of the difference")
        for d in differences:
            times = [_ms(part.time_s) if part else "not run" for part in (d.first, d.second)]
            share = _percent(d.delta_s, found.delta_s) if found.delta_s else ""
            table.add_row(d.label, *times, _ms(d.delta_s), share)
        table.add_row("step", _ms(found.first.step_s), _ms(found.second.step_s), _ms(found.delta_s), "", style="bold")
        console.print(table)
        console.print()


def _print_rest(console: "Console", count: int) -> None:
    if count > 0:
        console.print(f"{count} operators more: --top {count + 1000} lists all", highlight=False)


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i and column != "bound by" else "left", overflow="fold")
    return table


def _bound(part: "OperatorPart") -> str:
    if part.exposed_s or part.sent_bytes:
        return "network"
    return "host" if part.host_s > part.compute_s else part.limit.replace("none", "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms" if abs(seconds) >= SHOWN_S else ""


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole and abs(part) >= SHOWN_S else ""


def _document(found: "Breakdown | Comparison") -> dict[str, Any]:
    """The data and the sentences."""
    from dataclasses import asdict

    from moebench.explain import Breakdown
    from moebench.explain_words import difference_words, words

    sentences = words(found) if isinstance(found, Breakdown) else difference_words(found)
    return {"words": sentences, **asdict(found)}
