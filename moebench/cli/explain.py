"""`moebench explain`: where the time of a case goes, or what makes the difference between two cases."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from moebench.explain.case import Breakdown, Comparison, OperatorPart, RegionPart
    from moebench.results.rows import Row
    from moebench.results.store import RunFolder
    from moebench.sim.recorded import RecordedCase

# Columns that a narrow terminal does without, the first ones first.
SPARE = ("compute", "host", "exposed", "FLOPs", "bytes", "calls", "bound by", "of the difference")
LEFT = ("region", "operator", "bound by")
SHOWN = 0.0005  # smaller numbers would be written as 0.000
SAME = 1e-4  # of a time, that rounding may make
OTHER_CODE = "it was made with other code than explains it here"
SHORT_S = 1e-3  # shorter cases are told in microseconds


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("case", required=False)
@click.argument("other", required=False, metavar="[CASE]")
@click.option("--top", default=12, show_default=True, type=click.IntRange(1), help="Operators to list.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(run: Path, case: str | None, other: str | None, top: int, as_json: bool) -> None:
    """Say where each millisecond of CASE of the run folder RUN goes; of two cases, what makes the difference.

    CASE is a case's name, or the end or another part of it that no other case has. Without CASE: the run's cases and
    their times.
    """
    from moebench.cli.tables import print_json
    from moebench.explain.case import compare

    if case is None:
        _list_cases(run, as_json)
        return
    from moebench.run import resume
    from moebench.sim.recorded import load_case

    job = resume(run)
    asked = [load_case(run, name, job) for name in (case, other) if name is not None]
    parts = [_beside_its_row(taken_apart(recorded), job.folder) for recorded in asked]
    found = compare(*parts) if len(parts) > 1 else parts[0]
    if as_json:
        print_json(_document(found))
        return
    _show(found, top)
    for part in parts if len(parts) > 1 else ():
        if part.notes and part.notes[0].endswith(OTHER_CODE):
            click.echo(f"Note: {part.case}: {part.notes[0]}.")
    for recorded in asked:
        _show_plan(recorded)


def _show_plan(recorded: "RecordedCase") -> None:
    """What a case's system planned, where it plans."""
    from moebench import kinds
    from moebench.cli.tables import output_width

    kind = recorded.case.workload.kind
    if kinds.KINDS[kind].explain:
        def tell(line: str) -> None:
            click.echo(f"planning: {line}", err=True)

        for line in kinds.of(kind, "explain")(recorded.case, recorded.topology, output_width(), tell):
            click.echo(line)


def _beside_its_row(found: "Breakdown", folder: "RunFolder") -> "Breakdown":
    """Noted first, where the run's own row has another time."""
    from moebench.quantities import times
    from moebench.results.rows import SUBJECTS

    values = [row.value for row in folder.rows(*SUBJECTS) if row.case == found.case and row.sample is None]
    value = next((one for one in values if one), None)
    if value is None or abs(found.step_s / value - 1) < SAME:
        return found
    other = f"the run's row says {times(value)} ({value / found.step_s - 1:+.2%})"
    return replace(found, notes=(f"{other}: {OTHER_CODE}", *found.notes))


def taken_apart(recorded: "RecordedCase") -> "Breakdown":
    """The breakdown of one case of a run."""
    from moebench import kinds
    from moebench.explain.case import breakdown

    kind = recorded.case.workload.kind
    if kinds.KINDS[kind].apart:
        return kinds.of(kind, "apart")(recorded)
    replay = recorded.replayed()
    return breakdown(
        recorded.case.name,
        recorded.programs,
        replay,
        recorded.moved_by(replay.step_time_s),
        recorded.case.workload.unit_of_work,
    )


def _list_cases(run: Path, as_json: bool) -> None:
    """Every case of a run with its time, or why it has none."""
    from moebench.cli.tables import print_json, print_table
    from moebench.results.rows import CPU_BOUND, SUBJECTS, SUPPORTED
    from moebench.run import resume

    job = resume(run)
    rows: dict[str, Row] = {}
    for row in job.folder.rows(*SUBJECTS):
        if row.sample is None:
            rows.setdefault(row.case, row)
    entries: list[dict[str, Any]] = []
    cells = []
    for case in job.cases:
        own = rows.get(case.name)
        status = own.status if own else "not run yet"
        is_timed = case.workload.metric != SUPPORTED
        time_s = own.value if own and is_timed else None
        mark = CPU_BOUND if own and own.detail.get("mark") == CPU_BOUND else ""
        cells.append([case.name, case.engine, f"{mark} {_time(time_s, time_s)}".strip() if time_s else status])
        entry: dict[str, Any] = {"name": case.name, "engine": case.engine, "status": status}
        entry |= {f"{case.workload.metric}_s": time_s} if is_timed else {}
        entries.append(entry | ({"mark": mark} if mark else {}))
    if as_json:
        print_json(entries)
        return
    print_table(["case", "engine", "time"], cells)


def _show(found: "Breakdown | Comparison", top: int) -> None:
    from moebench.cli.tables import is_wrapped, output_width, wrapped
    from moebench.explain.case import Breakdown
    from moebench.explain.words import difference_words, words

    sentences = words(found) if isinstance(found, Breakdown) else difference_words(found)
    for sentence in sentences:
        click.echo(wrapped(sentence, output_width()) if is_wrapped() else sentence)
    click.echo()
    if isinstance(found, Breakdown):
        _print_parts("region", found.regions, found)
        _print_parts("operator", found.operators[:top], found)
    else:
        _print_differences(found, top)
    if len(found.operators) > top:
        click.echo(f"{len(found.operators) - top} operators more: --top {len(found.operators)} lists all")


def _print_parts(title: str, parts: "tuple[RegionPart | OperatorPart, ...]", whole: "Breakdown") -> None:
    """Compute, exposed communication, host and share of each part."""
    from moebench.explain.case import OperatorPart
    from moebench.quantities import amount

    columns = [title, "time", "share", "compute", "exposed", "host", *_counts(title)]
    rows = []
    for part in parts:
        cells = [_time(part.time_s, whole.step_s), _percent(part.time_s, whole.step_s)]
        cells += [_time(part_s, whole.step_s) for part_s in (part.compute_s, part.exposed_s, part.host_s)]
        label = part.region
        if isinstance(part, OperatorPart):
            label = f"{part.name}  {part.region}, {part.phase}"
            moved = amount(part.sent_bytes, "B") if part.sent_bytes else amount(part.device_bytes, "B")
            cells += [str(part.calls), amount(part.flops, "FLOP") if part.flops else "", moved, _bound(part)]
        rows.append([label, *cells])
    _print_fitting(columns, rows)


def _counts(title: str) -> tuple[str, ...]:
    return ("calls", "FLOPs", "bytes", "bound by") if title == "operator" else ()


def _print_differences(found: "Comparison", top: int) -> None:
    """Regions, then operators, with both times."""
    longest_s = max(found.first.step_s, found.second.step_s)
    click.echo(f"A = {found.first.case}\nB = {found.second.case}\n")
    for title, differences in (("region", found.regions), ("operator", found.operators[:top])):
        rows = []
        for d in differences:
            times = [_time(part.time_s, longest_s) if part else "not run" for part in (d.first, d.second)]
            share = _percent(d.delta_s, found.delta_s) if found.delta_s else ""
            rows.append([d.label, *times, _time(d.delta_s, longest_s), share])
        whole = (found.first.step_s, found.second.step_s, found.delta_s)
        rows.append([f"the whole {found.first.what}", *(_time(part_s, longest_s) for part_s in whole), ""])
        _print_fitting([title, "A", "B", "A less B", "of the difference"], rows)


def _print_fitting(columns: list[str], rows: list[list[str]]) -> None:
    """A table as wide as there is room for: columns are dropped, and named, before anything is broken."""
    from moebench.cli.tables import chosen, fitting, output_width, table_lines, wrapped

    kept = fitting(columns, rows, SPARE, output_width())
    heading, *lines = table_lines(kept, chosen(columns, rows, kept), set(kept) - set(LEFT))
    click.echo("\n".join([click.style(heading, bold=True), *lines]))
    dropped = [title for title in columns if title not in kept]
    if dropped:
        click.echo(wrapped(f"(left out here: {', '.join(dropped)}; --json has all)", output_width()))
    click.echo()


def _bound(part: "OperatorPart") -> str:
    if part.exposed_s or part.sent_bytes:
        return "network"
    return "host" if part.host_s > part.compute_s else part.limit.replace("none", "")


def _time(seconds: float, whole_s: float) -> str:
    """A part of something that lasts `whole_s`, in the unit of the whole."""
    scale, unit = (1e6, "us") if abs(whole_s) < SHORT_S else (1e3, "ms")
    return f"{seconds * scale:,.3f} {unit}" if abs(seconds * scale) >= SHOWN else ""


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole and abs(part / whole) >= SHOWN else ""


def _document(found: "Breakdown | Comparison") -> dict[str, Any]:
    """The data and the sentences."""
    from dataclasses import asdict

    from moebench.explain.case import Breakdown
    from moebench.explain.words import difference_words, words

    sentences = words(found) if isinstance(found, Breakdown) else difference_words(found)
    return {"words": sentences, **asdict(found)}
