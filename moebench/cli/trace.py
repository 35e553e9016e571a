"""`moebench trace`: the simulated timeline of a case as a file for Perfetto."""

from pathlib import Path

import click

from moebench.cli.paths import OutputFile


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("case")
@click.option(
    "-o",
    "output",
    type=OutputFile(),
    metavar="FILE",
    required=True,
    help="File to write; compressed where it ends with .gz.",
)
def command(run: Path, case: str, output: Path) -> None:
    """Write the timeline of CASE of the run folder RUN: open it at ui.perfetto.dev or chrome://tracing.

    CASE is a case's name, or a part of it that no other case has.
    """
    write_timeline(run, case, output)


def write_timeline(run: Path, case: str, output: Path | None) -> None:
    """Write the timeline of a case to a file, or to standard output."""
    from moebench import kinds
    from moebench.export.perfetto import chrome_trace, trace_text, write_trace
    from moebench.results.store import storage
    from moebench.sim.recorded import load_case

    recorded = load_case(run, case)
    kind = recorded.case.workload.kind
    if kinds.KINDS[kind].timeline:
        document = kinds.of(kind, "timeline")(recorded)
    else:
        document = chrome_trace(recorded.programs, recorded.replayed(), recorded.case.name)
    if output is None:
        click.echo(trace_text(document))
        return
    with storage(output):
        write_trace(document, output)
    click.echo(output)
