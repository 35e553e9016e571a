"""Where gradient sums go once computation has its order: into gaps between all-to-alls, joined where that is free.

The artifact's rules. All-to-alls share the communication stream with the sums of gradients, and a sum that is launched
as soon as its gradient is there delays the next all-to-all. So sums are taken out, the all-to-alls are simulated, and
each gap between two of them takes the sums that are ready and fit, the largest first; the rest follows the last one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moebench.systems.lancet.instructions import ALL_REDUCE, ALL_TO_ALL, COMPUTE, Instruction, Program
from moebench.systems.lancet.timeline import Timeline, simulate
from moebench.systems.lancet.trials import Trials

SecondsOfBytes = Callable[[int], float]


@dataclass(frozen=True)
class Sums:
    """Which sums travel together.

    Attributes:
        groups: numbers of all-reduces, in the order of the communication stream; those of a group are one.
    """

    groups: tuple[tuple[int, ...], ...]


ALONE = Sums(())


def replace_all_reduces(program: Program, order: Sequence[int]) -> list[int]:
    """The order with its all-reduces between other collectives where they delay none.

    All-reduces that later computation reads stay where they are.
    """
    movable = _movable(program, order)
    launches = [number for number in order if program[number].kind == ALL_TO_ALL]
    if not movable or not launches:
        return list(order)
    without = [replace(one, time_s=0.0) if number in movable else one for number, one in enumerate(program)]
    timeline = simulate(without, order)
    waiting = sorted(movable, key=lambda number: (_ready(program, timeline, number), number))
    behind: dict[int, list[int]] = {}
    for one, following in pairwise(launches):
        behind[one] = _fill(program, timeline, waiting, timeline.end_s[one], timeline.start_s[following])
    behind[launches[-1]] = waiting
    return _merged(program, [number for number in order if number not in movable], behind)


def fuse(
    program: Program,
    order: Sequence[int],
    all_reduce_s: SecondsOfBytes,
    copy_s: SecondsOfBytes = lambda nbytes: 0.0,
    may_join: Callable[[int, int], bool] = lambda first, second: True,
) -> Sums:
    """Join sums that follow each other on the communication stream while the simulated makespan does not grow.

    Args:
        all_reduce_s: time of one all-reduce of so many bytes.
        copy_s: time to copy so many bytes into the joint buffer, and as long to copy them out.
        may_join: whether two all-reduces, by number, can be one (same dtype).
    """
    sums = [number for number in order if program[number].kind == ALL_REDUCE]
    if not sums:
        return ALONE
    adjacent = _adjacent(program, order)
    movable = _movable(program, order)
    groups: list[list[int]] = [[sums[0]]]
    trials = Trials(program, order, all_reduce_s, copy_s)
    trials.close((), sums[0])
    best_s = trials.makespan_s(groups[-1])
    for number in sums[1:]:
        joined = [*groups[-1], number]
        if (groups[-1][-1], number) in adjacent and {*joined} <= movable and may_join(groups[-1][-1], number):
            makespan_s = trials.makespan_s(joined)
            if makespan_s <= best_s + 1e-12:
                groups[-1], best_s = joined, makespan_s
                continue
        trials.close(groups[-1], number)
        groups.append([number])
    return Sums(tuple(map(tuple, groups)))


def fused(
    program: Program, order: Sequence[int], sums: Sums, all_reduce_s: SecondsOfBytes, copy_s: SecondsOfBytes
) -> list[Instruction]:
    """The program in its order with the groups of sums as one instruction each, between a copy in and a copy out.

    A group stands where its last sum does.
    """
    group_of = {number: group for group in sums.groups if len(group) > 1 for number in group}
    out: list[Instruction] = []
    new: dict[int, int] = {}
    joint: list[int] = []
    for number in order:
        group = group_of.get(number)
        if group is None:
            one = program[number]
            out.append(replace(one, needs=tuple(new[need] for need in one.needs)))
            new[number] = len(out) - 1
        elif number == group[-1]:
            needs = tuple(sorted({new[need] for member in group for need in program[member].needs}))
            nbytes = sum(program[member].nbytes for member in group)
            out.append(Instruction(f"pack_{program[number].name}", COMPUTE, copy_s(nbytes), needs))
            out.append(Instruction(program[number].name, ALL_REDUCE, all_reduce_s(nbytes), (len(out) - 1,), nbytes))
            joint.append(len(out) - 1)
            new.update(dict.fromkeys(group, joint[-1]))
    for at in joint:
        out.append(Instruction(f"unpack_{out[at].name}", COMPUTE, copy_s(out[at].nbytes), (at,)))
    return out


def _movable(program: Program, order: Sequence[int]) -> set[int]:
    """All-reduces whose sum only the end of the step reads."""
    read = {need for one in program for need in one.needs}
    return {number for number in order if program[number].kind == ALL_REDUCE and number not in read}


def _ready(program: Program, timeline: Timeline, number: int) -> float:
    return max((timeline.end_s[need] for need in program[number].needs), default=0.0)


def _fill(program: Program, timeline: Timeline, waiting: list[int], begin_s: float, end_s: float) -> list[int]:
    """Take out of `waiting` what goes into one gap: again and again the largest that is ready and still fits."""
    found: list[int] = []
    now_s = begin_s
    while True:
        fitting = [
            number
            for number in waiting
            if max(now_s, _ready(program, timeline, number)) + program[number].time_s <= end_s
        ]
        if not fitting:
            return found
        choice = max(fitting, key=lambda number: (program[number].time_s, -number))
        now_s = max(now_s, _ready(program, timeline, choice)) + program[choice].time_s
        waiting.remove(choice)
        found.append(choice)


def _merged(program: Program, rest: Sequence[int], behind: dict[int, list[int]]) -> list[int]:
    """The rest in its order; each sum as early as what it needs and the collective before it on the stream allow."""
    place = {number: at for at, number in enumerate(rest)}
    after: dict[int, list[int]] = {}
    at = -1
    for number in rest:
        if program[number].is_compute:
            continue
        at = max(at, place[number])
        for one in behind.get(number, ()):
            at = max([at, *(place[need] for need in program[one].needs)])
            after.setdefault(at, []).append(one)
    order: list[int] = []
    for at, number in enumerate(rest):
        order.append(number)
        order.extend(after.get(at, ()))
    return order


def _adjacent(program: Program, order: Sequence[int]) -> set[tuple[int, int]]:
    """Pairs of all-reduces with no other collective between them."""
    collectives = [number for number in order if not program[number].is_compute]
    return {
        (a, b)
        for a, b in pairwise(collectives)
        if program[a].kind == ALL_REDUCE and program[b].kind == ALL_REDUCE
    }
