"""Which computation goes under which all-to-all: the paper's greedy best fit (algorithm 1), with the artifact's rules.

What can be moved in a backward is nearly all weight gradients, hence the name: the gradients of activations lead to the
next all-to-all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moebench.systems.lancet.instructions import ALL_TO_ALL, Program, of_kind
from moebench.systems.lancet.labels import Candidate, Problem


@dataclass(frozen=True, slots=True)
class GreedyRules:
    """What the artifact does beyond the paper's algorithm.

    Attributes:
        stops_at_twice: an all-to-all that has something takes nothing that is longer than twice what is left of it.
        forces_last_chance: what is left in the last all-to-all of its window goes there, however full it is.
    """

    stops_at_twice: bool = True
    forces_last_chance: bool = True


PAPER_RULES = GreedyRules(stops_at_twice=False, forces_last_chance=False)
ARTIFACT_RULES = GreedyRules()


@dataclass(frozen=True)
class Assignment:
    """Of each candidate the place of its all-to-all, None where it stays.

    Attributes:
        is_proven: whether nothing can be better; the greedy proves nothing.
    """

    places: tuple[int | None, ...]
    is_proven: bool = False


def greedy(problem: Problem, rules: GreedyRules = ARTIFACT_RULES) -> Assignment:
    """Visit the all-to-alls in order; fill each with the best fitting candidate until it is full or none is left.

    A candidate is available once those it needs have been assigned.
    """
    places: list[int | None] = [None] * len(problem.candidates)
    for place, time_s in enumerate(problem.times_s):
        left_s, has_some = time_s, False
        while left_s > 0:
            choice = _best_fit(problem.candidates, places, place, left_s)
            if choice is None:
                break
            best_s = problem.candidates[choice].time_s
            if rules.stops_at_twice and has_some and best_s > 2 * left_s:
                break
            places[choice], has_some = place, True
            left_s -= best_s
        if rules.forces_last_chance:
            for choice, one in enumerate(problem.candidates):
                if places[choice] is None and one.last == place:
                    _force(problem.candidates, places, choice, place)
    return Assignment(tuple(places))


def overlapped_s(problem: Problem, assignment: Assignment) -> float:
    """The paper's objective: of each all-to-all the time that has computation under it."""
    filled = [0.0] * len(problem.times_s)
    for one, place in zip(problem.candidates, assignment.places):
        if place is not None:
            filled[place] += one.time_s
    return sum(map(min, problem.times_s, filled))


def check_assignment(problem: Problem, assignment: Assignment, keeps_precedence: bool = True) -> None:
    """Raise ValueError where a candidate is outside its window, or before one that it needs."""
    for one, place in zip(problem.candidates, assignment.places, strict=True):
        if place is None:
            continue
        if not one.first <= place <= one.last:
            raise ValueError(f"instruction {one.number} under all-to-all {place}, outside {one.first} to {one.last}")
        for need in one.needs if keeps_precedence else ():
            before = assignment.places[need]
            if before is None or before > place:
                raise ValueError(f"instruction {one.number} is under all-to-all {place} before what it needs")


@dataclass(frozen=True, slots=True)
class Filled:
    """One all-to-all with what was put under it.

    Attributes:
        hidden_s: how much of its time has computation under it, at most all.
        under: names and times, in issue order.
    """

    all_to_all: str
    time_s: float
    hidden_s: float
    under: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        """`under all_to_all_start_5 (2.10 ms, 1.80 hidden): bmm_3 1.20 ms, mm_7 0.60 ms`."""
        what = ", ".join(f"{name} {1e3 * time_s:.2f} ms" for name, time_s in self.under) or "nothing"
        return f"under {self.all_to_all} ({1e3 * self.time_s:.2f} ms, {1e3 * self.hidden_s:.2f} hidden): {what}"


def record(program: Program, problem: Problem, assignment: Assignment) -> tuple[Filled, ...]:
    """What went under each all-to-all of the program, in order."""
    found = []
    for place, number in enumerate(of_kind(program, ALL_TO_ALL)):
        under = tuple(
            (program[one.number].name, one.time_s)
            for one, chosen in zip(problem.candidates, assignment.places)
            if chosen == place
        )
        hidden_s = min(problem.times_s[place], sum(time_s for _, time_s in under))
        found.append(Filled(program[number].name, problem.times_s[place], hidden_s, under))
    return tuple(found)


def _best_fit(
    candidates: Sequence[Candidate], places: Sequence[int | None], place: int, left_s: float
) -> int | None:
    """The available candidate whose time is nearest to what is left; of equals the first."""
    best, distance = None, float("inf")
    for choice, one in enumerate(candidates):
        if places[choice] is not None or not one.first <= place <= one.last:
            continue
        if abs(left_s - one.time_s) < distance and all(places[need] is not None for need in one.needs):
            best, distance = choice, abs(left_s - one.time_s)
    return best


def _force(candidates: Sequence[Candidate], places: list[int | None], choice: int, place: int) -> None:
    """Put a candidate here, behind all that it needs and that has no place yet."""
    pending = [choice]
    while pending:
        one = pending.pop()
        if places[one] is None:
            places[one] = place
            pending.extend(candidates[one].needs)
