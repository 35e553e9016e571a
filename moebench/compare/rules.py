"""Thresholds: how large a change must be, for which metric and cases, and whether it decides the exit status.

A file `moebench.toml` in the folder or above it holds them:

    schema_version = 1
    baselines = "results/baselines"

    [[thresholds]]
    metric = "step_time"
    case = "overall/*"
    engine = "local"
    relative = "3 %"
    absolute = "20 us"

Of the rules that fit a quantity, each key counts as the last of them sets it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moebench.compare.metrics import is_part
from moebench.compare.side import Key
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.toml_file import TomlFile, read_toml
from moebench.workloads.units import BYTES, COUNT, FLOP, SHARE, TIME, parse

FILE = "moebench.toml"
BASELINES = "results/baselines"
BOTH, TEST, EFFECT = "both", "test", "effect"
WAYS = (BOTH, TEST, EFFECT)

_DIMENSIONS = {"s": TIME, "B": BYTES, "FLOP": FLOP, "1": COUNT}
_PATTERNS = ("metric", "case", "engine", "part")
# Float sums may come out in another order: far below any change of a program.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Threshold:
    """What one rule asks of a change before it is called one.

    Attributes:
        relative: share of the base value; absolute: in the unit of the metric. Both must be exceeded.
        same_within: of measured quantities: `same` when the whole interval of the change is within it.
        gates: whether the verdict decides the exit status.
        by: of measured quantities: `both` the tests and the size of the effect, or only one of them.
    """

    relative: float = 0.0
    absolute: float = 0.0
    same_within: float = 0.05
    gates: bool = True
    by: str = BOTH


@dataclass(frozen=True)
class Rule:
    """One entry of the file: patterns, and the keys that it sets."""

    metric: str = "*"
    case: str = "*"
    engine: str = "*"
    part: str = "*"
    sets: Mapping[str, Any] = field(default_factory=dict)
    dimension: str | None = None
    where: str = ""

    def fits(self, key: Key) -> bool:
        """Whether it is about a quantity."""
        return (
            fnmatchcase(key.metric, self.metric)
            and fnmatchcase(key.engine, self.engine)
            and fnmatchcase(key.part, self.part)
            and fnmatchcase(key.case, self.case)
        )


@dataclass(frozen=True)
class Rules:
    """All of a file.

    Attributes:
        baselines: folder of baselines.
    """

    rules: tuple[Rule, ...] = ()
    baselines: Path = Path(BASELINES)

    def of(self, key: Key, unit: str, measured: bool) -> Threshold:
        """What a change of a quantity must exceed.

        Raises:
            InputError: a rule states an absolute threshold in another unit than the metric's.
        """
        found = Threshold(relative=0.01 if measured else ROUNDING, gates=not is_part(key.metric, key.part))
        for rule in self.rules:
            if not rule.fits(key):
                continue
            if rule.dimension is not None and rule.dimension != _DIMENSIONS.get(unit):
                raise InputError(f"{rule.where}: {key.metric} is in {unit or 'no unit'}, and this is {rule.dimension}")
            found = replace(found, **rule.sets)
        return found


def find_rules(path: Path | None = None) -> Rules:
    """The rules of a file, else of the nearest moebench.toml in this folder or above it, else the defaults.

    Raises:
        InputError: the file can't be read or says something unknown; names file, line and key.
    """
    if path is None:
        here = Path.cwd()
        path = next((folder / FILE for folder in (Path(), *here.parents) if (folder / FILE).is_file()), None)
        if path is None:
            return Rules()
    return load_rules(path)


def load_rules(path: Path) -> Rules:
    """The rules of a file; its `baselines` is relative to it."""
    file = read_toml(path)
    for name in file.data:
        if name not in ("thresholds", "baselines"):
            raise one_of("key", name, ("schema_version", "thresholds", "baselines"), file.where([name]))
    baselines = file.data.get("baselines", BASELINES)
    if not isinstance(baselines, str) or not baselines or "\0" in baselines:
        raise InputError(f"{file.where(['baselines'])}: {baselines!r} is not the name of a folder")
    entries = file.data.get("thresholds", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{file.where(['thresholds'])}: write each as a table: [[thresholds]]")
    rules = tuple(_rule(file, index, entry) for index, entry in enumerate(entries))
    return Rules(rules, path.parent / baselines)


def _rule(file: TomlFile, index: int, entry: Mapping[str, Any]) -> Rule:
    def where(name: str) -> str:
        return file.where(["thresholds", index, name])

    known = (*_PATTERNS, *(f.name for f in fields(Threshold)))
    sets: dict[str, Any] = {}
    patterns: dict[str, str] = {}
    dimension = None
    for name, value in entry.items():
        if name not in known:
            raise one_of("key", name, known, where(name))
        if name in _PATTERNS:
            if not isinstance(value, str):
                raise InputError(f"{where(name)}: {value!r} is not a pattern")
            patterns[name] = value
        elif name == "absolute":
            dimension, sets[name] = _absolute(value, where(name))
        else:
            sets[name] = _setting(name, value, where(name))
    if not sets:
        settings = ", ".join(f.name for f in fields(Threshold))
        raise InputError(f"{file.where(['thresholds', index])}: sets nothing; it may set {settings}")
    return Rule(**patterns, sets=sets, dimension=dimension, where=where("absolute"))


def _setting(name: str, value: Any, where: str) -> Any:
    if name == "gates":
        if not isinstance(value, bool):
            raise InputError(f"{where}: {value!r} is neither true nor false")
        return value
    if name == "by":
        if value not in WAYS:
            raise one_of("way to judge", value, WAYS, where)
        return value
    share = parse(value, SHARE, where).si
    if share < 0:
        raise InputError(f"{where}: {value} is below zero")
    return share


def _absolute(value: Any, where: str) -> tuple[str, float]:
    """Dimension and SI value of an absolute threshold: its unit says which metrics it can be about."""
    problems: list[InputError] = []
    for dimension in (TIME, BYTES, FLOP, COUNT):
        try:
            found = parse(value, dimension, where).si
        except InputError as error:
            problems.append(error)
            continue
        if found < 0:
            raise InputError(f"{where}: {value} is below zero")
        return dimension, found
    raise InputError(f"{where}: {value!r} is not an amount; write for example 20 us, 64 KiB or 3") from problems[0]


def thresholds_text(threshold: Threshold, unit: str) -> str:
    """`1 %`, `3 % and 2e-05 s`: what a change had to exceed."""
    parts = [f"{100 * threshold.relative:.3g} %"] if threshold.relative > ROUNDING else []
    parts += [f"{threshold.absolute:.3g}" + (f" {unit}" if unit != "1" else "")] if threshold.absolute else []
    return " and ".join(parts) or "nothing"

