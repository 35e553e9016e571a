"""What a comparison knows of one run, whoever wrote it: exact values, measured samples, where they come from.

Exact values (bytes, launches, simulated time) are the same at every repetition; measured ones are samples by process.
Texts are cut and made printable when a run is read (moebench.compare.escape), so that nothing behind it meets a name of
ten megabytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Where one metric of a case has several values: which one it is.
PARTS = ("regime", "region", "phase", "tier", "by", "resource", "transfer", "ranks", "cached", "replicas", "step")
MEASURED_ENGINES = ("local", "cluster")
FACTS = ("cpu", "cores", "architecture", "system", "gpus")  # of a machine, in the order of its title
PYTEST = "pytest-benchmark"  # the suite and the engine of what that plugin timed


class Key(NamedTuple):
    """What is compared with what: one value of one metric of one case under one engine."""

    case: str
    engine: str
    metric: str
    part: str = ""

    @property
    def quantity(self) -> str:
        """The metric, and which one of several values."""
        return self.metric + (f" [{self.part}]" if self.part else "")


class Exact(NamedTuple):
    """A value that every repetition gives again."""

    value: float
    unit: str


@dataclass(frozen=True)
class Samples:
    """Measured values of one quantity.

    Attributes:
        processes: samples of each process, runs one after another.
        runs: number of the run that each process belongs to; a baseline pools several.
        clock_mhz: median clock of the GPU that was timed, where it was recorded.
        problem: why nothing may be judged by them, or empty.
    """

    unit: str
    processes: tuple[np.ndarray, ...]
    runs: tuple[int, ...]
    clock_mhz: float | None = None
    problem: str = ""

    @property
    def count(self) -> int:
        """Samples in all."""
        return sum(group.size for group in self.processes)


@dataclass(frozen=True)
class CaseInfo:
    """What decides the numbers of a case besides the code.

    Attributes:
        hash: of everything that the suite and the user chose.
        torch, cost_model: versions; machine: digest of the described machine. None where nothing says.
        status: `passed`, or why it has no number, with the reason.
        what_if: what --set made of the machine; empty without it.
    """

    hash: str
    torch: str | None = None
    cost_model: int | None = None
    machine: str | None = None
    status: str = "passed"
    reason: str = ""
    what_if: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine that measured; two runs on equal ones may be compared.

    Attributes:
        facts: of FACTS those that are known.
    """

    facts: Mapping[str, str]

    @property
    def title(self) -> str:
        """In one line."""
        found = {name: self.facts[name] for name in FACTS if name in self.facts}
        return ", ".join(f"{text} cores" if name == "cores" else text for name, text in found.items())


@dataclass
class Side:
    """One run, or a baseline.

    Attributes:
        name: its path, or the baseline's name.
        created: when it was run; commit: of the code, with `+` where files were changed since.
        machine: None where nothing was measured.
        finished: whether every planned case has rows; whole: whether nothing of the suite was left out on purpose.
        environment: versions that may move a measured time, to be named where they differ.
        what_if: what --set made of the machine; empty without it.
        path: of a run folder; lines: first and last line of what it says of a Key, or of a case under an engine.
    """

    name: str
    suite: str
    created: str = ""
    commit: str = ""
    machine: Machine | None = None
    finished: bool = True
    whole: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    cases: dict[tuple[str, str], CaseInfo] = field(default_factory=dict)
    exact: dict[Key, Exact] = field(default_factory=dict)
    samples: dict[Key, Samples] = field(default_factory=dict)
    what_if: str = ""
    path: Path | None = None
    lines: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)

    def lines_of(self, key: Key) -> tuple[int, int] | None:
        """First and last line of a quantity, else of its case; None where no file has lines of it."""
        return self.lines.get(key) or self.lines.get(key[:2])

    @property
    def is_measured(self) -> bool:
        """Whether anything of it was timed by a clock."""
        return bool(self.samples)


def samples_of(
    unit: str, values: Sequence[Sequence[float]], clocks_mhz: Sequence[float] = (), problem: str = ""
) -> Samples:
    """Samples of one run's processes."""
    groups = tuple(np.asarray(group, dtype=np.float64) for group in values if len(group))
    clock = float(np.median(clocks_mhz)) if len(clocks_mhz) else None
    if not problem and any(not np.isfinite(group).all() for group in groups):
        problem = "a sample is not a finite number"
    elif not problem and any((group <= 0).any() for group in groups):
        problem = "a sample is not above zero"
    return Samples(unit, groups, (0,) * len(groups), clock, problem)
