"""`moebench check`: a run beside a baseline; the same as `compare`, against what somebody accepted."""

from pathlib import Path
from typing import Any

import click

from moebench.cli.compare import conclude, outputs


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--baseline", "name", required=True, metavar="NAME", help="Name of the baseline, such as main.")
@outputs
def command(run: Path, name: str, across_machines: bool, config: Path | None, **shown: Any) -> int:
    """Compare RUN with the baseline NAME, which `moebench accept` made.

    Exact values are compared on every machine; measured ones where the baseline has samples of this machine, or with
    --across-machines of any. Exits as `compare` does.
    """
    from moebench.compare.check import check
    from moebench.compare.read import read_side
    from moebench.compare.rules import find_rules

    return conclude(check(read_side(run), find_rules(config), name, across_machines), **shown)
