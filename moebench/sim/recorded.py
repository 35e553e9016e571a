"""Cases of a run folder with the programs recorded for them: the only place that knows how a run stores both."""

import gzip
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moebench.cases.case import Case
from moebench.kinds import KINDS
from moebench.program import Program
from moebench.sim.replay import Replay, replay
from moebench.sim.uncertainty import Values, draw, influence, seen_by
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology

if TYPE_CHECKING:
    from moebench.run import Job

SHOWN = 8  # near names that an error lists
NEAR = 0.75  # of a name's parts, on average; less alike is another name


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
        return replay(self.programs, self.topology, self.seen())

    def seen(self) -> Values:
        """The values of all parameters under which the run's rows were simulated."""
        return seen_by(self.case.workload, self.topology.hardware, self._values())

    def moved_by(self, outcome: np.ndarray) -> dict[str, float]:
        """Rank correlation of each uncertain parameter with an outcome over the draws."""
        return influence(self.topology.parameters(), self._values(), outcome)

    def _values(self) -> dict[str, np.ndarray]:
        return draw(self.topology.parameters(), self.samples, self.seed)


def load_case(run: Path, name: str, job: "Job | None" = None) -> RecordedCase:
    """The case of a run folder that `find_case` finds.

    Args:
        job: of that folder, from `resume`, where several cases are loaded: planning takes longer than loading.

    Raises:
        InputError: no such run, no such case, several, or nothing was recorded for it.
    """
    from moebench.run import resume

    job = job or resume(run)
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

    path = traces / f"{trace_key(case, topology)}.json.gz"
    try:
        programs = programs_from_json(gzip.decompress(path.read_bytes()).decode())
    except FileNotFoundError:
        if not KINDS[case.workload.kind].programs:
            why = "it compares many programs; the case of a job that is laid out as one of them records its own"
        elif case.engine != "sim":
            why = f"it ran on engine {case.engine}; only sim records programs"
        else:
            why = "it was not run yet, or it is unsupported (see its row in results.jsonl)"
        raise InputError(f"{case.name}: no program was recorded: {why}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, InputError) as error:
        raise InputError(f"{path}: {error}") from None
    for program in programs:
        if any(op.index != place or max(op.waits_on, default=-1) >= place for place, op in enumerate(program.ops)):
            raise InputError(f"{path}: not a recorded program: the operators of rank {program.rank} are not in order")
    return programs


def find_case(name: str, cases: Iterable[Case]) -> Case:
    """The case of this name; else the only one that ends with it, has it as whole parts, or contains it as text.

    One case that several experiments run is still one: the first of them stands for it.

    Raises:
        InputError: none or several; lists them, or near ones.
    """
    by_name = {case.name: case for case in cases}
    whole = f"/{name.strip('/')}"
    matches = (
        [known for known in by_name if known == name],
        [known for known in by_name if f"/{known}".endswith(whole)],
        [known for known in by_name if f"{whole}/" in f"/{known}/"],
        [known for known in by_name if name in known],
    )
    found = next(filter(None, matches), [])
    if len({_computed(by_name[known]) for known in found}) == 1:
        return by_name[found[0]]
    if found:
        raise InputError(f"{len(found)} cases match {name!r}; say which: {_listed(found)}")
    near = _near(name, list(by_name))
    rest = f"near ones: {_listed(near)}" if near else f"none of the {len(by_name)} cases is near"
    raise InputError(f"no case matches {name!r}; {rest}; `moebench explain RUN` lists all")


def _computed(case: Case) -> str:
    """What decides a case's number: all but the experiment that asks for it and which assumptions that one sweeps."""
    return replace(case, experiment="", assumptions={}, is_default=True).hash


def _near(name: str, known: list[str]) -> list[str]:
    """Names each of whose parts is like one of the parts that were asked for, most alike first."""
    asked = [part for part in name.lower().split("/") if part]
    alike = {(a, b): SequenceMatcher(None, a, b).ratio() for a in asked for k in known for b in k.lower().split("/")}
    scores = {k: sum(max(alike[a, b] for b in k.lower().split("/")) for a in asked) / len(asked or " ") for k in known}
    return sorted((k for k in known if scores[k] >= NEAR), key=lambda k: -scores[k])[:SHOWN]


def _listed(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "") if names else "none"
