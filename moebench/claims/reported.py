"""What papers report, as Claims: one row of a CSV file, checked. Bad input names file, line and column.

The packaged files lie in moebench.reported, one a paper; `compared_with.csv` beside them lists the baselines that each
paper compared with, which is what `best-other` means, and other readings of it; `implementations.csv` says which kernel
a name stands for, `exchanges.csv` which exchange, `ways.csv` which system of a part.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.places import REPORTED, user_file, user_names

COLUMNS = (
    "id",
    "experiment",
    "metric",
    "relation",
    "system",
    "baseline",
    "config",
    "value",
    "unit",
    "evidence",
    "where",
    "note",
)
RELATIONS = ("equal", "at-least", "at-most", "max-over", "mean-over", "finding")
EVIDENCE = ("printed", "digitised", "official-repo", "secondary")
# How an error is computed, by unit; the number turns an absolute quantity into SI.
RATIO, FRACTION, EXACT, ABSOLUTE = "ratio", "fraction", "exact", "absolute"
SHARE = "share"
UNITS: Mapping[str, tuple[str, float]] = {
    "ratio": (RATIO, 1.0),
    "fraction": (FRACTION, 1.0),
    SHARE: (ABSOLUTE, 1.0),  # of a whole, such as a utilisation: unlike a reduction it has no winner
    "count": (EXACT, 1.0),
    "k": (EXACT, 1.0),
    "word": (EXACT, 1.0),
    "us": (ABSOLUTE, 1e-6),
    "ms": (ABSOLUTE, 1e-3),
    "s": (ABSOLUTE, 1.0),
    "minutes": (ABSOLUTE, 60.0),
    "hours": (ABSOLUTE, 3600.0),
    "days": (ABSOLUTE, 86400.0),
    "B": (ABSOLUTE, 1.0),
    "MB": (ABSOLUTE, 1e6),
    "GB": (ABSOLUTE, 1e9),
    "tokens/s": (ABSOLUTE, 1.0),
    "ktokens/s": (ABSOLUTE, 1e3),
    "images/s": (ABSOLUTE, 1.0),
    "samples/s": (ABSOLUTE, 1.0),
    "nats": (ABSOLUTE, 1.0),
}
BEST_OTHER = "best-other"
INDEPENDENT = "independent"  # how the note of a row begins that is not the paper's own word
COMPARED_FILE = "compared_with.csv"
IMPLEMENTATIONS_FILE = "implementations.csv"
EXCHANGES_FILE = "exchanges.csv"
WAYS_FILE = "ways.csv"
_BESIDE = (COMPARED_FILE, IMPLEMENTATIONS_FILE, EXCHANGES_FILE, WAYS_FILE)


@dataclass(frozen=True)
class Claim:
    """A reported number or finding.

    Attributes:
        paper: name of its file, the suite it belongs to.
        scope: the `key=value` pairs of `config`, as text.
        value: the reported number in `unit`, or the word of a finding.
        file, line: where it is written.
    """

    id: str
    paper: str
    experiment: str
    metric: str
    relation: str
    system: str
    baseline: str
    value: float | str
    unit: str
    evidence: str
    where: str = ""
    note: str = ""
    scope: Mapping[str, str] = field(default_factory=dict)
    file: str = ""
    line: int = 0

    @property
    def kind(self) -> str:
        """`ratio`, `fraction`, `exact` or `absolute`: how its error is computed."""
        return UNITS[self.unit][0]

    @property
    def is_independent(self) -> bool:
        """Whether someone else than the paper's authors says so: `where` then names who."""
        return self.note.startswith(INDEPENDENT)

    @property
    def is_definition(self) -> bool:
        """Whether the number is true by definition: something normalised to itself."""
        return self.kind == RATIO and self.relation == "equal" and self.value == 1.0


def papers() -> tuple[str, ...]:
    """Papers with reported numbers, the package's and the user's."""
    return tuple(sorted({*_packaged(), *user_names(REPORTED)} - {Path(name).stem for name in _BESIDE}))


@cache
def _packaged() -> tuple[str, ...]:
    names = [entry.name for entry in files("moebench.reported").iterdir()]
    return tuple(n.removesuffix(".csv") for n in names if n.endswith(".csv") and n not in _BESIDE)


def claims_of(paper: str) -> tuple[Claim, ...]:
    """The claims of a paper, or of a file of the user's.

    Raises:
        InputError: there is no such paper, with those there are; or a fault in the file.
    """
    file = own_file(paper)
    return _claims_of_package(paper) if file is None else load_claims(file)


def own_file(paper: str, where: str = "") -> Path | None:
    """The user's file of reported numbers, by its name in one of the user's folders or its path; None: the package's.

    Raises:
        InputError: there is no such paper or file, or it has the name of one of the package's.
    """
    place = f"{where}: " if where else ""
    if not paper.endswith(".csv"):
        if paper in _packaged():
            return None
        found = user_file(REPORTED, paper, where)
        if found is None or paper not in papers():
            raise one_of("reported" if where else "paper", paper, papers(), where)
        return found
    path = Path(paper)
    if not path.is_file():
        raise InputError(f"{place}no file {path}")
    if path.stem in _packaged():
        raise InputError(f"{place}{path}: {path.stem} is the name of a paper of moebench's own; rename the file")
    return path


@cache
def _claims_of_package(paper: str) -> tuple[Claim, ...]:
    return load_claims(Path(str(files("moebench.reported") / f"{paper}.csv")))


@dataclass(frozen=True)
class Reading:
    """Whom `best-other` means in one reading of a paper: systems by name, with options where a variant is meant."""

    name: str
    baselines: tuple[str, ...]
    where: str


@cache
def readings(paper: str) -> tuple[Reading, ...]:
    """Who the rivals of a paper are, its own reading first; empty where its list is not known."""
    text = (files("moebench.reported") / COMPARED_FILE).read_text(encoding="utf-8")
    return tuple(
        Reading(row["rivals"], tuple(row["baselines"].split(";")), row["where"])
        for row in csv.DictReader(text.splitlines())
        if row["paper"] == paper
    )


def compared_with(paper: str) -> tuple[str, ...]:
    """The baselines that a paper compared with; empty where its list is not known."""
    return readings(paper)[0].baselines if readings(paper) else ()


@cache
def implementations() -> Mapping[str, tuple[str, str]]:
    """Names that papers give to kernels -> operator and implementation of the registry of kernels."""
    text = (files("moebench.reported") / IMPLEMENTATIONS_FILE).read_text(encoding="utf-8")
    return {row["name"]: (row["op"], row["implementation"]) for row in csv.DictReader(text.splitlines())}


@cache
def exchanges() -> Mapping[str, str]:
    """Names that papers give to exchanges -> what they are called here."""
    text = (files("moebench.reported") / EXCHANGES_FILE).read_text(encoding="utf-8")
    return {row["name"]: row["exchange"] for row in csv.DictReader(text.splitlines())}


@cache
def ways() -> Mapping[str, str]:
    """Names that papers give to systems of parts -> what they are called here."""
    text = (files("moebench.reported") / WAYS_FILE).read_text(encoding="utf-8")
    return {row["name"]: row["system"] for row in csv.DictReader(text.splitlines())}


def own_names(claim: Claim) -> set[str]:
    """What a claim's system is called: by its paper, and in result rows."""
    kernel = implementations().get(claim.system, ("", claim.system))[1]
    return {claim.system, kernel, exchanges().get(claim.system, claim.system)}


def load_claims(path: Path) -> tuple[Claim, ...]:
    """The claims of a CSV file.

    Raises:
        InputError: naming file, line and column.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text: {error}") from None
    found: dict[str, Claim] = {}
    for line, row in _records(text, path):
        claim = _claim(row, path, line)
        if claim.id in found:
            first = found[claim.id].line
            raise InputError(f"{path}, line {line}, column id: {claim.id!r} stands on line {first} already")
        found[claim.id] = claim
    return tuple(found.values())


def _records(text: str, path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    try:
        header = next(reader, [])
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise InputError(f"{path}, line 1: missing column {missing[0]}; the columns are {','.join(COLUMNS)}")
        for name in header:
            if name not in COLUMNS:
                raise one_of("column", name, COLUMNS, f"{path}, line 1")
        start = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(header):
                raise InputError(f"{path}, line {start}: {len(cells)} cells, the header has {len(header)}")
            if cells:
                yield start, dict(zip(header, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _claim(row: Mapping[str, str], path: Path, line: int) -> Claim:
    where = f"{path}, line {line}, column"
    for column in ("id", "experiment", "metric", "value"):
        if not row[column].strip():
            raise InputError(f"{where} {column}: is empty")
    for column, choices in (("relation", RELATIONS), ("unit", UNITS), ("evidence", EVIDENCE)):
        if row[column] not in choices:
            raise one_of(column, row[column], choices, f"{where} {column}")
    if (row["unit"] == "word") != (row["relation"] == "finding"):
        raise InputError(f"{where} unit: a finding has the unit word, and nothing else has it")
    return Claim(
        id=row["id"],
        paper=path.stem,
        experiment=row["experiment"],
        metric=row["metric"],
        relation=row["relation"],
        system=row["system"],
        baseline=row["baseline"],
        value=row["value"] if row["unit"] == "word" else _number(row["value"], f"{where} value"),
        unit=row["unit"],
        evidence=row["evidence"],
        where=row["where"],
        note=row["note"],
        scope=_scope(row["config"], f"{where} config"),
        file=str(path),
        line=line,
    )


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}: {text!r} is not a number") from None
    if not math.isfinite(value):
        raise InputError(f"{where}: {text!r} is not a finite number")
    return value


def _scope(text: str, where: str) -> dict[str, str]:
    scope: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        key, equals, value = item.partition("=")
        if not (equals and key.strip() and value.strip()):
            raise InputError(f"{where}: {item!r} is not key=value; pairs are separated by ;")
        if key.strip() in scope:
            raise InputError(f"{where}: {key.strip()} stands there twice")
        scope[key.strip()] = value.strip()
    return scope
