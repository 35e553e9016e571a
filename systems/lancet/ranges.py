"""Which ranges of the forward become pipelines: groups of instructions, and dynamic programming over them.

Paper, section 5.1: T(n) = min over i of T(i) + c(i, n), where c is the time of instructions i to n as they are, or in
the best number of parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moebench.systems.lancet.instructions import Program


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of a range and the number of parts that gives it; 1 leaves it as it is."""

    seconds: float
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Chosen:
    """A range of groups, `first` to before `end`, with its cost."""

    first: int
    end: int
    cost: Cost


def group(
    program: Program, group_s: float, spans: Sequence[tuple[int, int]] = (), boundaries: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Cut instructions into runs of at least `group_s` seconds each, but for the last before a boundary.

    Args:
        spans: (first, end) of instructions that stay together, whatever their time.
        boundaries: instructions before which a group ends; none inside a span counts.

    Returns:
        (first, end) of every group, in order.
    """
    held = {at for first, end in spans for at in range(first + 1, end)}
    forced = {*boundaries, *(at for span in spans for at in span)}
    groups: list[tuple[int, int]] = []
    first, seconds = 0, 0.0
    for at, one in enumerate(program):
        if at > first and at not in held and (at in forced or seconds >= group_s):
            groups.append((first, at))
            first, seconds = at, 0.0
        seconds += one.time_s
    return [*groups, (first, len(program))] if program else []


def choose(count: int, longest: int, cost: Callable[[int, int], Cost]) -> list[Chosen]:
    """The ranges that cover `count` groups in the least time, none longer than `longest` groups.

    Of equal ones the shorter last range is taken. Costs are asked for once each: at most `count * longest` times.

    Raises:
        ValueError: a longest range below one group.
    """
    if longest < 1:
        raise ValueError(f"longest = {longest}: a range has at least one group")
    best: list[float] = [0.0]
    last: list[Chosen] = []
    for end in range(1, count + 1):
        options = [Chosen(first, end, cost(first, end)) for first in range(end - 1, max(-1, end - longest - 1), -1)]
        taken = min(options, key=lambda one: best[one.first] + one.cost.seconds)
        best.append(best[taken.first] + taken.cost.seconds)
        last.append(taken)
    found: list[Chosen] = []
    end = count
    while end:
        found.append(last[end - 1])
        end = found[-1].first
    return found[::-1]


def best_parts(
    whole_s: float, counts: Sequence[int], parts_s: Callable[[int], float], stops_early: bool = True
) -> Cost:
    """The number of parts with the least time; 1 unless splitting is shorter.

    Args:
        counts: what is allowed, ascending.
        stops_early: stop at the first count that is no better than the one before, as the artifact does.
    """
    best, before = Cost(whole_s), float("inf")
    for count in counts:
        seconds = parts_s(count)
        if seconds < best.seconds:
            best = Cost(seconds, count)
        if stops_early and seconds >= before:
            break
        before = seconds
    return best


def common_counts(sizes: Sequence[int], most: int) -> list[int]:
    """Numbers of parts, at least 2 and at most `most`, that divide every size and leave two of the smallest."""
    smallest = min(sizes, default=0)
    return [k for k in range(2, min(most, smallest // 2) + 1) if all(size % k == 0 for size in sizes)]
