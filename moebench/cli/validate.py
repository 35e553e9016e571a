"""`moebench validate`: checks a file or a run folder as the program that reads it would."""

from pathlib import Path

import click

from moebench.workloads.errors import InputError


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> None:
    """Check FILE: a suite, topology or hardware file (TOML), reported numbers (CSV), or a run folder."""
    click.echo(check(file))


def check(path: Path) -> str:
    """What a valid file holds, in one line.

    Raises:
        InputError: what is wrong, and where.
    """
    from moebench.workloads.validate import validate

    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir():
        return _run(path)
    text = validate(path, {".csv": _claims})
    return text + _planned(path) if f"{path}: suite " in text else text


def _claims(path: Path) -> str:
    from moebench.claims.reported import load_claims

    claims = load_claims(path)
    return f"{path}: reported numbers of {path.stem}, {len(claims)} claims"


def _planned(path: Path) -> str:
    """A suite is valid when its cases can be planned: systems and workloads too."""
    from moebench.plan import Filters, plan
    from moebench.workloads.load import load_suite

    return f"; {len(plan(load_suite(str(path.absolute())), Filters()))} cases"


def _run(path: Path) -> str:
    from moebench.results.store import RunFolder

    folder = RunFolder.open(path)
    rows = folder.rows()
    cases = len({row.case_hash for row in rows})
    state = "finished" if folder.record.get("finished") else "not finished"
    planned = folder.record.get("cases")
    return f"{path}: run of suite {folder.suite.name}, {state}: {cases} of {planned} cases, {len(rows)} rows"
