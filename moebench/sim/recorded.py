"""Cases of a run folder with the programs recorded for them: the only place that knows how a run stores both."""

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from moebench.case import Case
from moebench.program import Program
from moebench.sim.replay import Replay, replay
from moebench.sim.uncertainty import draw, influence
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology

SHOWN = 8  # near names that an error lists


@dataclass(frozen=True)
class RecordedCase:
    """A case, the machine that it names, and its recorded programs.

    Attributes:
        samples, seed: of the run's suite, so that draws are those of its results.
    """

    case: Case
    topology: Topology
    programs: tuple[Program, ...]
    samples: int
    seed: int

    def replayed(self) -> Replay:
        """The replay that the run's rows come from."""
        return replay(self.programs, self.topology, self._values())

    def moved_by(self, outcome: np.ndarray) -> dict[str, float]:
        """Rank correlation of each uncertain parameter with an outcome over the draws."""
        return influence(self.topology.parameters(), self._values(), outcome)

    def _values(self) -> dict[str, np.ndarray]:
        return draw(self.topology.parameters(), self.samples, self.seed)


def load_case(run: Path, name: str) -> RecordedCase:
    """The case of a run folder whose name is `name`, or the only one whose name contains it.

    Raises:
        InputError: no such run, no such case, several, or nothing was recorded for it.
    """
    from moebench.run import resume

    job = resume(run)
    case = find_case(name, job.cases)
    topology = job.topologies[case.topology]
    programs = load_programs(job.folder.traces, case, topology)
    return RecordedCase(case, topology, programs, job.suite.samples, job.suite.seed)


def load_programs(traces: Path, case: Case, topology: Topology) -> tuple[Program, ...]:
    """The programs that the `sim` engine recorded for a case.

    Raises:
        InputError: there are none, with the reason as far as it is known; or the file can't be read.
    """
    from moebench.sim.engine import trace_key
    from moebench.trace.serialise import programs_from_json

    path = traces / f"{trace_key(case, topology.ranks)}.json.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except FileNotFoundError:
        if case.engine != "sim":
            why = f"it ran on engine {case.engine}; only sim records programs"
        else:
            why = "it was not run yet, or it is unsupported (see its row in results.jsonl)"
        raise InputError(f"{case.name}: no program was recorded: {why}") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None
    return programs_from_json(text)


def find_case(name: str, cases: Iterable[Case]) -> Case:
    """The case of this name, or the only one whose name contains it.

    Raises:
        InputError: none or several; lists near ones.
    """
    by_name = {case.name: case for case in cases}
    if name in by_name:
        return by_name[name]
    containing = [known for known in by_name if name in known]
    if len(containing) == 1:
        return by_name[containing[0]]
    if containing:
        raise InputError(f"{len(containing)} cases match {name!r}; say which: {_listed(containing)}")
    near = get_close_matches(name, by_name, n=SHOWN, cutoff=0.3) or list(by_name)
    raise InputError(f"no case matches {name!r}; near ones: {_listed(near)}")


def _listed(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "") if names else "none"
