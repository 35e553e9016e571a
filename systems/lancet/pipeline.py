"""How long a range takes in parts on two streams (paper, section 5.3).

A stage is a run of consecutive instructions of one stream. A part's stage runs as a unit; in every stage the parts go
one after another, so that one part computes while another is exchanged.
"""

from collections.abc import Callable, Mapping
from itertools import groupby

from moebench.systems.lancet.instructions import COMPUTE, Instruction, Program
from moebench.systems.lancet.timeline import Timeline, simulate


def stages_of(program: Program) -> list[list[int]]:
    """The stages, numbers of instructions each; views belong to where they stand."""
    return [list(run) for _, run in groupby(range(len(program)), key=lambda number: program[number].is_compute)]


def in_parts(
    program: Program,
    parts: int,
    part_s: Callable[[int, int], float],
    merge_s: Mapping[int, float] | None = None,
) -> list[Instruction]:
    """The instructions of all parts in issue order: a part's collective right behind the stage that it needs.

    Args:
        program: of the range; what it needs from outside is there.
        part_s: of an instruction's number and the number of parts: how long one part of it takes.
        merge_s: of the numbers whose results are put together: how long that takes, behind the stage of the last part.
    """
    issued: list[Instruction] = []
    place: dict[tuple[int, int], int] = {}
    for stage in _launched_behind(program):
        for part in range(parts):
            for number in stage:
                one = program[number]
                needs = tuple(place[need, part] for need in one.needs)
                issued.append(Instruction(f"{one.name}.{part}", one.kind, part_s(number, parts), needs))
                place[number, part] = len(issued) - 1
        for number in stage:
            if merge_s and merge_s.get(number):
                needs = tuple(place[number, part] for part in range(parts))
                issued.append(Instruction(f"{program[number].name}.merge", COMPUTE, merge_s[number], needs))
    return issued


def _launched_behind(program: Program) -> list[list[int]]:
    """Each stage of computation with the stage of collectives behind it."""
    found: list[list[int]] = []
    for stage in stages_of(program):
        if found and not program[stage[0]].is_compute:
            found[-1].extend(stage)
        else:
            found.append(list(stage))
    return found


def pipeline(
    program: Program,
    parts: int,
    part_s: Callable[[int, int], float],
    merge_s: Mapping[int, float] | None = None,
) -> Timeline:
    """The timeline of a range in parts."""
    return simulate(in_parts(program, parts, part_s, merge_s))


def cut(program: Program, first: int, end: int) -> list[Instruction]:
    """Instructions `first` to before `end` by themselves; what they need from before is there."""
    return [
        Instruction(
            one.name, one.kind, one.time_s, tuple(need - first for need in one.needs if need >= first), one.nbytes
        )
        for one in program[first:end]
    ]

