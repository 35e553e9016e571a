"""`moebench new-system`: a package for a system of one's own that passes its tests as it is written."""

from pathlib import Path

import click


@click.command()
@click.argument("name")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="DIR",
    help="Folder to make; default moebench-NAME, here.",
)  # fmt: skip
def command(name: str, out: Path | None) -> None:
    """Write a package with the system NAME: module, entry point, tests, README.

    NAME: lower-case letters, digits and _. The system is correct and small, and commented so that you know what to
    replace; docs/new-system.md builds another one step by step.
    """
    from moebench.new_system import module_of, write_package

    folder = write_package(name, out)
    click.echo(f"{folder}: a package with the system {name}, in {module_of(name)}/system.py")
    click.echo(f"next: cd {folder} && pip install -e '.[test]' && pytest && moebench list systems")
