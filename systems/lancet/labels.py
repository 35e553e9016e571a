"""Which computation may run while which all-to-all is under way (paper, section 4.1).

An instruction is legal under an all-to-all when no path leads from one to the other. All-to-alls are launched in their
order, so an instruction that must be done before an earlier one, or that follows from a later one, can't be there
either; what is left is a window of consecutive all-to-alls for each instruction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moebench.systems.lancet.instructions import ALL_REDUCE, ALL_TO_ALL, Program, of_kind


@dataclass(frozen=True, slots=True)
class Candidate:
    """Computation that can be moved.

    Attributes:
        number: of the instruction.
        first, last: the window, by place among the program's all-to-alls; both are in it.
        needs: candidates, by place in their list, that must have been computed before; the nearest ones.
    """

    number: int
    time_s: float
    first: int
    last: int
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be assigned: times of the all-to-alls in order, and the candidates in order."""

    times_s: tuple[float, ...]
    candidates: tuple[Candidate, ...]


def reachability(program: Program) -> tuple[list[int], list[int]]:
    """Of every instruction, as bits by place among the all-to-alls: those it leads to, and those that lead to it."""
    places = {number: place for place, number in enumerate(of_kind(program, ALL_TO_ALL))}
    comes_from, leads_to = [0] * len(program), [0] * len(program)
    for number, one in enumerate(program):
        for need in one.needs:
            own = 1 << places[need] if need in places else 0
            comes_from[number] |= comes_from[need] | own
    for number in range(len(program) - 1, -1, -1):
        own = 1 << places[number] if number in places else 0
        for need in program[number].needs:
            leads_to[need] |= leads_to[number] | own
    return leads_to, comes_from


def problem_of(program: Program, may_move: Sequence[bool] | None = None) -> Problem:
    """The candidates of a program with their windows.

    Args:
        may_move: of each instruction, whether it may be one: in a step in parts, what belongs to the backward; None:
            all.

    Beside the paper's label, the artifact's rules: only computation, none that needs a gradient's sum over the ranks
    (updates), none that needs nothing (constants). Views take no time: they go along with what reads them.
    """
    all_to_alls = of_kind(program, ALL_TO_ALL)
    leads_to, comes_from = reachability(program)
    after_sum = _after(program, ALL_REDUCE)
    found: list[Candidate] = []
    nearest: list[frozenset[int]] = []  # candidates that an instruction needs through others that are none
    for number, one in enumerate(program):
        before = frozenset().union(*(nearest[need] for need in one.needs)) if one.needs else frozenset()
        window = _window(leads_to[number], comes_from[number], len(all_to_alls))
        may = may_move is None or may_move[number]
        is_movable = may and one.is_compute and one.time_s > 0 and bool(one.needs) and not after_sum[number]
        if is_movable and window is not None:
            found.append(Candidate(number, one.time_s, *window, tuple(sorted(before))))
            nearest.append(frozenset((len(found) - 1,)))
        else:
            nearest.append(before)
    return Problem(tuple(program[number].time_s for number in all_to_alls), tuple(found))


def _window(leads_to: int, comes_from: int, count: int) -> tuple[int, int] | None:
    """From behind the last all-to-all before it to in front of the first one after it; None without one between."""
    first = comes_from.bit_length()
    last = (leads_to & -leads_to).bit_length() - 2 if leads_to else count - 1
    return (first, last) if first <= last else None


def _after(program: Program, kind: str) -> list[bool]:
    """Whether each instruction needs one of a kind, at any distance."""
    found: list[bool] = []
    for one in program:
        found.append(any(found[need] or program[need].kind == kind for need in one.needs))
    return found
