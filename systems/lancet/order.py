"""The issue order that an assignment asks for: moved computation right behind the launch of its all-to-all."""

from collections.abc import Mapping, Sequence

from moebench.systems.lancet.instructions import ALL_TO_ALL, Program, of_kind
from moebench.systems.lancet.labels import Problem
from moebench.systems.lancet.weight_gradients import Assignment


def order_of(program: Program, problem: Problem, assignment: Assignment) -> list[int]:
    """Every instruction once, behind what it needs; what nobody moved keeps its order.

    What needs moved computation follows it, as early as it can.
    """
    moved: dict[int, list[int]] = {}
    for one, place in zip(problem.candidates, assignment.places):
        if place is not None:
            moved.setdefault(of_kind(program, ALL_TO_ALL)[place], []).append(one.number)
    return _Emitter(program, moved).order()


class _Emitter:
    def __init__(self, program: Program, moved: Mapping[int, Sequence[int]]) -> None:
        self._program, self._moved = program, moved
        self._is_moved = {number for numbers in moved.values() for number in numbers}
        self._done: set[int] = set()
        self._order: list[int] = []
        self._late: list[int] = []

    def order(self) -> list[int]:
        for number in range(len(self._program)):
            if number in self._done or number in self._is_moved:
                continue
            if all(need in self._done for need in self._program[number].needs):
                self._emit(number)
            else:
                self._late.append(number)  # it needs what was moved behind it
            if number in self._moved:
                for one in self._moved[number]:
                    self._emit_with_needs(one)
                self._catch_up()
        return self._order

    def _emit(self, number: int) -> None:
        self._order.append(number)
        self._done.add(number)

    def _emit_with_needs(self, number: int) -> None:
        """Views and other work that was issued later and is needed here come along."""
        pending = [number]
        while pending:
            one = pending[-1]
            missing = [need for need in self._program[one].needs if need not in self._done]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if one not in self._done:
                self._emit(one)

    def _catch_up(self) -> None:
        left = []
        for number in self._late:
            if number in self._done:
                continue
            if all(need in self._done for need in self._program[number].needs):
                self._emit(number)
            else:
                left.append(number)
        self._late = left
