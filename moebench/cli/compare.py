"""`moebench compare`: what changed from one run to another, and whether it counts."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moebench.cli.paths import OutputFile
from moebench.workloads.errors import InputError

if TYPE_CHECKING:
    from moebench.compare.comparison import Comparison

_OUTPUTS = (
    click.option("--across-machines", is_flag=True, help="Compare samples of different machines, and say so."),
    click.option("--strict", is_flag=True, help="Exit 3 where something is inconclusive, missing or re-based."),
    click.option("--all", "everything", is_flag=True, help="Show every quantity, also the same and parts of others."),
    click.option("--config", type=click.Path(path_type=Path), metavar="FILE",
                 help="Thresholds; default moebench.toml here or in a folder above."),
    click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output."),
    click.option("--markdown", "as_markdown", is_flag=True, help="Markdown for a pull request's comment."),
    click.option("--junit", type=OutputFile(), metavar="FILE", help="Also write JUnit XML."),
    click.option("--html", type=OutputFile(), metavar="FILE", help="Also write a page: tables, intervals, rows."),
)  # fmt: skip


def outputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that `compare` and `check` share."""
    for option in reversed(_OUTPUTS):
        function = option(function)
    return function


@click.command()
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("head", type=click.Path(path_type=Path))
@outputs
def command(base: Path, head: Path, across_machines: bool, config: Path | None, **shown: Any) -> int:
    """Compare HEAD with BASE: run folders, or files of pytest-benchmark (a folder of files: a process each).

    Bytes, launches and simulated times are compared exactly; where torch, the described machine or the cost model
    changed they are `re-based`. Measured times are `slower` or `faster` when a rank test, the size of the effect and
    every process agree.

    Exits 0 where nothing is slower, 1 where something is slower or broken, 2 for bad input, 3 (with --strict) where
    something is not decided.
    """
    from moebench.compare.comparison import compare
    from moebench.compare.read import read_side
    from moebench.compare.rules import find_rules

    rules = find_rules(config)
    return conclude(compare(read_side(base), read_side(head), rules, across_machines), **shown)


def conclude(
    comparison: "Comparison", *, strict: bool, everything: bool, as_json: bool, as_markdown: bool, junit: Path | None,
    html: Path | None,
) -> int:  # fmt: skip
    """Print a comparison in the form that was asked for; the exit status."""
    if as_json and as_markdown:
        raise InputError("--json and --markdown both want standard output: choose one")
    if junit is not None:
        from moebench.compare.documents import to_junit
        from moebench.results.store import storage, write_atomically

        with storage(junit):
            write_atomically(junit, to_junit(comparison))
    if html is not None:
        from moebench.report.comparison_view import write_comparison
        from moebench.results.store import storage

        with storage(html):
            write_comparison(comparison, html, strict)
    if as_json:
        from moebench.cli.tables import print_json
        from moebench.compare.documents import to_json

        print_json(to_json(comparison, strict))
    elif as_markdown:
        from moebench.compare.documents import to_markdown

        click.echo(to_markdown(comparison, everything, strict), nl=False)
    else:
        from moebench.compare.show import print_comparison

        print_comparison(comparison, everything, strict)
    return comparison.exit_status(strict)
