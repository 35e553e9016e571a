"""What the passes see of a graph: instructions with a time, a stream and what they need. Plain data, no torch.

A collective is one instruction, from its launch to its result; the wait is no instruction of its own: whoever reads the
result needs the collective. Instructions are numbered in the issue order of the graph as it was captured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

COMPUTE = "compute"
ALL_TO_ALL, ALL_REDUCE = "all_to_all", "all_reduce"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One unit of work.

    Attributes:
        kind: `compute`, or the name of the collective.
        time_s: how long it keeps its stream busy; 0 for views.
        needs: numbers of the instructions whose results it reads, all smaller than its own.
        nbytes: of a collective, what a rank puts in.
    """

    name: str
    kind: str
    time_s: float
    needs: tuple[int, ...] = ()
    nbytes: int = 0

    @property
    def is_compute(self) -> bool:
        """Whether it runs on the compute stream; all others run on the communication stream."""
        return self.kind == COMPUTE


Program = Sequence[Instruction]


def of_kind(program: Program, kind: str) -> list[int]:
    """The numbers of the instructions of a kind, in order."""
    return [number for number, one in enumerate(program) if one.kind == kind]


def check_program(program: Program) -> None:
    """Raise ValueError where an instruction needs one that is not before it, or takes a negative time."""
    for number, one in enumerate(program):
        if any(not 0 <= need < number for need in one.needs):
            raise ValueError(f"instruction {number} ({one.name}) needs {one.needs}: only earlier ones may be needed")
        if not one.time_s >= 0:
            raise ValueError(f"instruction {number} ({one.name}) takes {one.time_s} s: must be at least 0")


def check_order(program: Program, order: Sequence[int]) -> None:
    """Raise ValueError unless `order` has every instruction once, behind all that it needs."""
    place = {number: at for at, number in enumerate(order)}
    if len(place) != len(order) or len(order) != len(program):
        raise ValueError("an order must have every instruction exactly once")
    for number, need in _edges(program):
        if place[need] > place[number]:
            raise ValueError(f"{program[number].name} is issued before {program[need].name}, which it needs")


def _edges(program: Program) -> Iterator[tuple[int, int]]:
    for number, one in enumerate(program):
        for need in one.needs:
            yield number, need
