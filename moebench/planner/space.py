"""What is asked of a planner, and every setting that it may answer with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moebench.systems.job_interface import JobSystem, Spread, problem
from moebench.systems.job_registry import get
from moebench.workloads.errors import InputError
from moebench.workloads.job import JOB_DTYPES, JobLayout
from moebench.workloads.machine import Topology
from moebench.workloads.models.decoder import DecoderModel

MICRO_BATCHES = (1, 2, 4, 8)
MOST_CHUNKS = 8


@dataclass(frozen=True)
class Question:
    """For which model, on what, and what may be chosen.

    Attributes:
        systems: a name stands for all options that its system finds worth trying; with options it is taken as it is.
        global_batch: sequences of a step.
        stages, chunks, micro_batches: that are tried; empty stages: all that divide the ranks; empty chunks: up to
            `MOST_CHUNKS`.
    """

    decoder: DecoderModel
    topology: Topology
    systems: tuple[str, ...]
    global_batch: int
    stages: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    dtype: str = "bf16"

    def check(self) -> None:
        """Refuse what no setting could answer.

        Raises:
            InputError: an unknown system, numbers below 1, an unknown dtype, or what the systems lack of the model.
        """
        for name, values in (
            ("batch", (self.global_batch,)),
            ("stages", self.stages),
            ("chunks", self.chunks),
            ("micro-batch", self.micro_batches),
        ):
            for value in values:
                if value < 1:
                    raise InputError(f"{name} = {value}: must be at least 1")
        if self.dtype not in JOB_DTYPES:
            raise InputError(f"dtype = {self.dtype!r}: choose one of {', '.join(JOB_DTYPES)}")
        missing = self.decoder.not_expressed
        if missing:
            parts = ", ".join(missing)
            raise InputError(f"model {self.decoder.name} can't be planned: the layers of the systems have no {parts}")
        self.names()

    def names(self) -> list[str]:
        """The systems with their options, each once.

        Raises:
            InputError: an unknown system.
        """
        found: list[str] = []
        for name in self.systems:
            system = get(name)
            is_fixed = "+" in name
            found += [system.name] if is_fixed else system.settings(self.decoder, self.topology.gpus_per_node)
        return list(dict.fromkeys(found))


def label_of(system: str, layout: JobLayout) -> str:
    """`NAME pp4x2 mb1`."""
    chunks = f"x{layout.chunks}" if layout.chunks > 1 else ""
    return f"{system} pp{layout.stages}{chunks} mb{layout.micro_batch}"


@dataclass(frozen=True)
class Setting:
    """One way to lay the job out."""

    system: str
    layout: JobLayout
    spread: Spread

    @property
    def label(self) -> str:
        """Which one."""
        return label_of(self.system, self.layout)


@dataclass(frozen=True)
class Refused:
    """A setting that no program was made of, since its numbers do not go."""

    system: str
    layout: JobLayout
    reason: str


def settings(question: Question) -> Iterator[Setting | Refused]:
    """Every setting, or why it is none; a reason that does not depend on chunks or micro-batch is told once."""
    for name in question.names():
        system = get(name)
        for stages in dict.fromkeys(question.stages) or divisors(question.topology.ranks):
            yield from _of_stages(question, system, stages)


def _of_stages(question: Question, system: JobSystem, stages: int) -> Iterator[Setting | Refused]:
    told: set[str] = set()
    for chunks in dict.fromkeys(question.chunks) or chunk_counts(question.decoder.layers, stages):
        for micro_batch in dict.fromkeys(question.micro_batches):
            layout = JobLayout(
                question.topology.ranks, question.topology.gpus_per_node, stages, question.global_batch, micro_batch,
                chunks,
            )  # fmt: skip
            reason = problem(system, question.decoder, layout, question.dtype)
            if reason is None:
                spread = system.spread(layout)
                assert isinstance(spread, Spread)
                yield Setting(system.name, layout, spread)
            elif reason not in told:
                told.add(reason)
                yield Refused(system.name, layout, reason)


def layers_of(question: Question, setting: Setting) -> int:
    """Of a chunk of a stage."""
    return question.decoder.layers // (setting.layout.stages * setting.layout.chunks)


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    return [n for n in range(1, number + 1) if number % n == 0]


def chunk_counts(layers: int, stages: int) -> Sequence[int]:
    """Chunks into which the layers of a stage can be cut; 1 where nothing can be divided, or there is one stage."""
    if stages == 1 or layers % stages:
        return [1]
    return [n for n in divisors(layers // stages) if n <= MOST_CHUNKS]


def with_layers(layout: JobLayout, spread: Spread) -> JobLayout:
    """The layout with one chunk a stage and as many micro-batches as stages: what a stage runs is the same."""
    return replace(layout, chunks=1, global_batch=layout.global_batch // spread.microbatches * layout.stages)
