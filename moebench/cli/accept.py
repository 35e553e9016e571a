"""`moebench accept`: makes a run the baseline that later ones are checked against."""

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--baseline", "name", required=True, metavar="NAME", help="Name of the baseline, such as main.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Thresholds and the baselines' folder; default moebench.toml here or in a folder above.",
)
def command(run: Path, name: str, config: Path | None) -> None:
    """Make RUN the baseline NAME, in results/baselines or where moebench.toml says.

    Exact values replace the old ones. Samples are pooled with those of up to four runs accepted before on this machine,
    except of what became slower or faster. Commit the files: their differences are small.
    """
    from moebench.cli.tables import print_table
    from moebench.compare.accept import accept
    from moebench.compare.cells import COLUMNS, MOST_SHOWN, cells, shown
    from moebench.compare.escape import plain
    from moebench.compare.read import read_side
    from moebench.compare.rules import find_rules

    accepted = accept(read_side(run), find_rules(config), name)
    if accepted.comparison is not None:
        findings = shown(accepted.comparison)
        if findings:
            print_table(COLUMNS, [[plain(cell, 1000) for cell in cells(f)] for f in findings[:MOST_SHOWN]])
        if len(findings) > MOST_SHOWN:
            click.echo(f"and {len(findings) - MOST_SHOWN} more")
    if accepted.runs:
        click.echo(f"samples of {accepted.runs} run{'s' * (accepted.runs != 1)} are pooled")
    if accepted.replaced:
        click.echo(f"{len(accepted.replaced)} quantities changed: their older samples are gone")
    click.echo(f"baseline: {accepted.folder}")
