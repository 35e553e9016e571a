"""`moebench validate`: checks a file, a run folder or a folder of states as the program that reads it would."""

from pathlib import Path

import click

from moebench.workloads.errors import InputError

# How the line of each begins.
KINDS = ("hardware", "topology", "suite", "model", "recorded routing", "reported numbers", "run", "expert states")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True,
    help="One JSON document: an object with `name`, `kind` and `holds`; of several files a list.",
)  # fmt: skip
def command(files: tuple[Path, ...], as_json: bool) -> int:
    """Check FILEs: suites, topologies, hardware, models (TOML), recorded routings (.npz), reported numbers (CSV), runs,
    folders of expert states (every state is read).

    Exits 2 with the first fault of each on standard error, and with --json nothing on standard output, where one is
    not valid.
    """
    from moebench.cli.tables import print_json

    found, faults = [], 0
    for file in files:
        try:
            text = check(file)
        except InputError as error:
            click.echo(f"moebench: {error}", err=True)
            faults += 1
            continue
        if not as_json:
            click.echo(text)
        holds = text.removeprefix(f"{file}: ")
        kind = next((kind for kind in KINDS if holds.startswith(kind)), "")
        found.append({"name": str(file), "valid": True, "kind": kind, "holds": holds})
    if as_json and not faults:
        print_json(found[0] if len(files) == 1 else found)
    return 2 if faults else 0


def check(path: Path) -> str:
    """What a valid file holds, in one line.

    Raises:
        InputError: what is wrong, and where.
    """
    from moebench.workloads.validate import validate

    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir():
        return _states(path) or _run(path)
    text = validate(path, {".csv": _claims})
    return text + _planned(path) if f"{path}: suite " in text else text


def _claims(path: Path) -> str:
    from moebench.claims.reported import load_claims

    claims = load_claims(path)
    return f"{path}: reported numbers of {path.stem}, {len(claims)} claim{'s' * (len(claims) != 1)}"


def _planned(path: Path) -> str:
    """A suite is valid when its cases can be planned, systems and workloads too, and its figures name real numbers."""
    from moebench.cases.plan import Filters, plan
    from moebench.figures.gather import gather
    from moebench.workloads.load import load_suite

    suite = load_suite(str(path.absolute()))
    try:
        figures = len(gather(suite))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return f"; {len(plan(suite, Filters()))} cases" + (f"; {figures} figures" if figures else "")


def _states(path: Path) -> str | None:
    from moebench.results.store import RUN_FILE

    if (path / RUN_FILE).exists():
        return None
    from moebench.systems.part_registry import described_states  # with torch, half a second that a run need not wait

    return described_states(path)


def _run(path: Path) -> str:
    from moebench.results.lines import repeated
    from moebench.results.store import RunFolder

    folder = RunFolder.open(path)
    _ = folder.filters, folder.topologies  # each refuses what it can't read
    twice = repeated(folder.results)
    if twice is not None:
        raise InputError(
            f"{folder.results}, line {twice[0]}: the case {twice[1]} stands there a second time; every reader takes "
            "the first"
        )
    rows = folder.rows()
    cases = len({row.case_hash for row in rows})
    state = "finished" if folder.record.get("finished") else "not finished"
    planned = folder.record.get("cases")
    return f"{path}: run of suite {folder.suite.name}, {state}: {cases} of {planned} cases, {len(rows)} rows"
