"""The paper's integer program for the same assignment, solved exactly: the yardstick of the greedy on small graphs."""

from typing import Any

from moebench.systems.lancet.labels import Problem
from moebench.systems.lancet.solver import new_solver, solver_module
from moebench.systems.lancet.weight_gradients import Assignment
from moebench.workloads.errors import InputError

_UNITS_PER_S = 10**9


def exact(problem: Problem, keeps_precedence: bool = True, limit_s: float = 10.0) -> Assignment:
    """Maximise the time of all-to-alls that has computation under it; every candidate once at most.

    Times are rounded to nanoseconds.

    Args:
        keeps_precedence: what a candidate needs must be under the same or an earlier all-to-all, as the greedy has it.
        limit_s: after this time the best so far is returned, unproven.

    Raises:
        InputError: ortools is not installed, or nothing was found in time.
    """
    cp_model = solver_module()
    model = cp_model.CpModel()
    chosen = [
        {place: model.NewBoolVar(f"x{number}_{place}") for place in range(one.first, one.last + 1)}
        for number, one in enumerate(problem.candidates)
    ]
    for choices in chosen:
        model.Add(sum(choices.values()) <= 1)
    if keeps_precedence:
        _keep_precedence(model, problem, chosen)
    hidden = []
    for place, time_s in enumerate(problem.times_s):
        variable = model.NewIntVar(0, _units(time_s), f"hidden{place}")
        parts = [_units(one.time_s) * c[place] for one, c in zip(problem.candidates, chosen) if place in c]
        model.Add(variable <= sum(parts))
        hidden.append(variable)
    model.Maximize(sum(hidden))
    solver = new_solver()
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.Solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InputError(f"the integer program found no assignment in {limit_s:g} s")
    places = tuple(next((p for p, x in choices.items() if solver.Value(x)), None) for choices in chosen)
    return Assignment(places, status == cp_model.OPTIMAL)


def _keep_precedence(model: Any, problem: Problem, chosen: list[dict[int, Any]]) -> None:
    for one, choices in zip(problem.candidates, chosen):
        for need in one.needs:
            for place, variable in choices.items():
                model.Add(sum(x for p, x in chosen[need].items() if p <= place) >= variable)


def _units(time_s: float) -> int:
    return round(time_s * _UNITS_PER_S)
