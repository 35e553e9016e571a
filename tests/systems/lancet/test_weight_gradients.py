"""Labels, the greedy and its rules, the exact program, the order that comes of an assignment."""

import itertools
import sys

import pytest

from moebench.systems.lancet.exact import exact
from moebench.systems.lancet.instructions import ALL_TO_ALL, COMPUTE, Instruction, check_order, check_program, of_kind
from moebench.systems.lancet.labels import Candidate, Problem, problem_of, reachability
from moebench.systems.lancet.order import order_of
from moebench.systems.lancet.timeline import simulate
from moebench.systems.lancet.weight_gradients import (
    ARTIFACT_RULES,
    PAPER_RULES,
    GreedyRules,
    check_assignment,
    greedy,
    overlapped_s,
    record,
)
from moebench.workloads.errors import InputError
from tests.systems.lancet.programs import backward

WORST, MEAN = 0.80, 0.95  # the greedy's share of the exact optimum over the random programs below
ALL_RULES = [GreedyRules(a, b) for a, b in itertools.product((False, True), repeat=2)]


def naive_paths(program):
    """reaches[i] = every instruction that i leads to."""
    reaches = [set() for _ in program]
    for number in range(len(program) - 1, -1, -1):
        for need in program[number].needs:
            reaches[need] |= {number} | reaches[number]
    return reaches


@pytest.mark.parametrize("seed", range(12))
def test_labels_are_paths(seed):
    """Windows hold exactly the all-to-alls without a path either way that the order of launches allows."""
    program = backward(seed)
    paths, all_to_alls = naive_paths(program), of_kind(program, ALL_TO_ALL)
    leads_to, comes_from = reachability(program)
    for number in range(len(program)):
        assert [bool(leads_to[number] >> j & 1) for j in range(len(all_to_alls))] == [
            a in paths[number] for a in all_to_alls
        ]
        assert [bool(comes_from[number] >> j & 1) for j in range(len(all_to_alls))] == [
            number in paths[a] for a in all_to_alls
        ]
    found = {one.number: one for one in problem_of(program).candidates}
    for number, one in enumerate(program):
        free = [
            j for j, a in enumerate(all_to_alls)
            if not any(b in paths[number] for b in all_to_alls[: j + 1])
            and not any(number in paths[b] for b in all_to_alls[j:])
        ]
        if number in found:
            assert free == list(range(found[number].first, found[number].last + 1))
            assert a_compute_with_time(one)
        else:
            assert not free or not a_compute_with_time(one) or not one.needs


def a_compute_with_time(one):
    """Whether it is on the compute stream and takes time."""
    return one.kind == COMPUTE and one.time_s > 0


@pytest.mark.parametrize("rules", ALL_RULES)
def test_greedy_is_within_the_stated_gap_of_the_exact_program(rules):
    """Of the exact optimum at least 80 % each time, 95 % on average; the optimum is never beaten."""
    shares = []
    for seed in range(30):
        problem = problem_of(backward(seed, layers=5))
        best, found = exact(problem), greedy(problem, rules)
        assert best.is_proven
        check_assignment(problem, best)
        check_assignment(problem, found)
        optimum = overlapped_s(problem, best)
        if optimum:
            shares.append(overlapped_s(problem, found) / optimum)
    assert WORST <= min(shares) <= max(shares) <= 1 + 1e-9
    assert sum(shares) / len(shares) >= MEAN


def brute_force(problem, keeps_precedence):
    """The optimum by trying everything."""
    best = 0.0
    windows = [[None, *range(one.first, one.last + 1)] for one in problem.candidates]
    for places in itertools.product(*windows):
        filled, is_legal = [0.0] * len(problem.times_s), True
        for one, place in zip(problem.candidates, places):
            if place is None:
                continue
            filled[place] += one.time_s
            for need in one.needs if keeps_precedence else ():
                is_legal &= places[need] is not None and places[need] <= place
        if is_legal:
            best = max(best, sum(map(min, problem.times_s, filled)))
    return best


@pytest.mark.parametrize("keeps_precedence", [True, False])
def test_the_exact_program_is_brute_force(keeps_precedence):
    """On programs small enough to try every assignment."""
    tried = 0
    for seed in range(40):
        problem = problem_of(backward(seed, layers=3))
        if 1 <= len(problem.candidates) <= 7:
            found = exact(problem, keeps_precedence)
            check_assignment(problem, found, keeps_precedence)
            assert overlapped_s(problem, found) == pytest.approx(brute_force(problem, keeps_precedence), abs=1e-8)
            tried += 1
    assert tried > 10


def test_the_greedy_takes_the_best_fit_first():
    """The paper's algorithm on a case worked by hand: nearest to what is left, until nothing is left."""
    problem = Problem((10.0, 4.0), tuple(Candidate(i, t, 0, 1) for i, t in enumerate((3.0, 9.0, 6.0, 2.0))))
    assert greedy(problem, PAPER_RULES).places == (1, 0, 1, 0)
    assert greedy(problem, GreedyRules(stops_at_twice=True, forces_last_chance=False)).places == (1, 0, None, 0)
    assert greedy(Problem((9.0, 4.0), problem.candidates), PAPER_RULES).places == (1, 0, None, 1)


def test_the_artifacts_rules():
    """Nothing longer than twice the rest joins others; the last chance is taken, with what it needs."""
    problem = Problem((10.0,), (Candidate(0, 9.0, 0, 0), Candidate(1, 2.5, 0, 0)))
    stop, never = GreedyRules(True, False), GreedyRules(False, False)
    assert greedy(problem, stop).places == (0, None)
    assert greedy(problem, never).places == (0, 0)
    assert greedy(Problem((1.0,), (Candidate(0, 9.0, 0, 0),)), stop).places == (0,)  # alone it may be longer
    chain = Problem((1.0, 1.0), (Candidate(0, 5.0, 0, 1), Candidate(1, 5.0, 0, 1, (0,)), Candidate(2, 1.0, 0, 0)))
    assert greedy(chain, ARTIFACT_RULES).places == (1, 1, 0)
    assert greedy(chain, PAPER_RULES).places == (1, None, 0)


@pytest.mark.parametrize("rules", ALL_RULES)
def test_orders_are_legal_and_only_move_what_was_assigned(rules):
    """Everything once, behind what it needs; on average the step gets shorter, and never 3 % longer."""
    before, after = [], []
    for seed in range(25):
        program = backward(seed, reduces=False)
        check_program(program)
        problem = problem_of(program)
        assignment = greedy(problem, rules)
        order = order_of(program, problem, assignment)
        check_order(program, order)
        place = {number: at for at, number in enumerate(order)}
        launches = of_kind(program, ALL_TO_ALL)
        for one, under in zip(problem.candidates, assignment.places):
            if under is not None:
                assert place[launches[under]] < place[one.number]
                assert under + 1 == len(launches) or place[one.number] < place[launches[under + 1]]
        before.append(simulate(program).makespan_s)
        after.append(simulate(program, order).makespan_s)
    assert max(b / a for a, b in zip(before, after)) < 1.03
    assert sum(after) < 0.95 * sum(before)


def test_the_timeline_is_two_streams_in_order():
    """A case worked by hand: what overlaps, what is exposed."""
    program = [
        Instruction("a", COMPUTE, 2.0),
        Instruction("x", "all_to_all", 5.0, (0,)),
        Instruction("b", COMPUTE, 3.0, (0,)),
        Instruction("v", COMPUTE, 0.0, (1,)),
        Instruction("y", "all_reduce", 1.0, (0,)),
        Instruction("c", COMPUTE, 1.0, (3,)),
    ]
    found = simulate(program)
    assert found.start_s == (0, 2, 2, 7, 7, 7)
    assert found.end_s == (2, 7, 5, 7, 8, 8)
    assert (found.makespan_s, found.compute_s, found.communication_s, found.exposed_s) == (8, 6, 6, 2)


def test_the_record_says_what_went_where():
    """Names, times and how much is hidden, of every all-to-all."""
    program = backward(3)
    problem = problem_of(program)
    assignment = greedy(problem)
    told = record(program, problem, assignment)
    assert [one.all_to_all for one in told] == [program[a].name for a in of_kind(program, ALL_TO_ALL)]
    assert sum(one.hidden_s for one in told) == pytest.approx(overlapped_s(problem, assignment))
    assert sum(len(one.under) for one in told) == sum(place is not None for place in assignment.places)
    assert "hidden): dw" in str(next(one for one in told if one.under))


def test_bad_programs_and_a_missing_solver_are_refused(monkeypatch):
    """A need that comes later, a negative time, an order that lacks one; no ortools."""
    with pytest.raises(ValueError, match="only earlier ones"):
        check_program([Instruction("a", COMPUTE, 1.0, (1,))])
    with pytest.raises(ValueError, match="at least 0"):
        check_program([Instruction("a", COMPUTE, -1.0)])
    program = [Instruction("a", COMPUTE, 1.0), Instruction("b", COMPUTE, 1.0, (0,))]
    for wrong, says in (([0], "exactly once"), ([1, 0], "which it needs")):
        with pytest.raises(ValueError, match=says):
            check_order(program, wrong)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(InputError, match="pip install ortools"):
        exact(problem_of(backward(0)))
