"""Sums of gradients in gaps and joined; the whole pass on the graph of a model."""

import itertools

import pytest

from moebench.kernels.collectives.group import described_group
from moebench.systems.lancet.all_reduces import ALONE, Sums, fuse, fused, replace_all_reduces
from moebench.systems.lancet.capture import capture
from moebench.systems.lancet.exact import exact
from moebench.systems.lancet.gradient_sync import with_gradient_sync
from moebench.systems.lancet.instructions import ALL_REDUCE, ALL_TO_ALL, COMPUTE, Instruction, check_order, of_kind
from moebench.systems.lancet.labels import problem_of
from moebench.systems.lancet.nodes import collective_of, is_wait
from moebench.systems.lancet.order import order_of
from moebench.systems.lancet.schedule import Switches, schedule
from moebench.systems.lancet.timeline import simulate
from moebench.systems.lancet.trials import Trials
from moebench.systems.lancet.weight_gradients import greedy
from tests.systems.lancet.models import SMALL, data_of, made_up_times, model_of
from tests.systems.lancet.programs import backward


def ordered(program):
    """The greedy's order."""
    problem = problem_of(program)
    return order_of(program, problem, greedy(problem))


@pytest.mark.parametrize("seed", range(20))
def test_replaced_sums_delay_no_all_to_all(seed):
    """The order is legal, the computation keeps its own, all-to-alls start as if there were no sums."""
    program = backward(seed)
    order = ordered(program)
    found = replace_all_reduces(program, order)
    check_order(program, found)
    assert [n for n in found if program[n].kind != ALL_REDUCE] == [n for n in order if program[n].kind != ALL_REDUCE]
    free = [one if one.kind != ALL_REDUCE else Instruction(one.name, COMPUTE, 0.0, one.needs) for one in program]
    alone, shared = simulate(free, found), simulate(program, found)
    for number in of_kind(program, ALL_TO_ALL):
        assert shared.start_s[number] == pytest.approx(alone.start_s[number])
    assert shared.makespan_s <= simulate(program, order).makespan_s + 1e-12


def test_a_gap_takes_the_largest_sum_that_fits():
    """A case worked by hand: of the sums ready after the first all-to-all 3 s fit, then 1 s; the rest is last."""
    program = [
        Instruction("a", COMPUTE, 1.0),
        *(Instruction(f"r{time}", ALL_REDUCE, time, (0,)) for time in (2.0, 3.0, 1.0)),
        Instruction("x", ALL_TO_ALL, 1.0, (0,)),
        Instruction("b", COMPUTE, 4.5, (4,)),
        Instruction("y", ALL_TO_ALL, 1.0, (5,)),
    ]
    assert replace_all_reduces(program, range(7)) == [0, 4, 2, 3, 5, 6, 1]
    read = [*program, Instruction("update", COMPUTE, 1.0, (2,))]
    assert replace_all_reduces(read, range(8)).index(2) == 1  # whose sum is read stays in front


def test_joined_sums_cost_no_time():
    """Every sum once, in order; the makespan does not grow by joining; what may not or must not be joined is not."""
    most = 0
    for seed in range(15):
        program = backward(seed)
        order = replace_all_reduces(program, ordered(program))

        def all_reduce_s(nbytes):
            return 0.9e-6 * nbytes  # 10 % less than the sums by themselves

        sums = fuse(program, order, all_reduce_s)
        everything = [number for group in sums.groups for number in group]
        assert everything == [number for number in order if program[number].kind == ALL_REDUCE]
        most += max(map(len, sums.groups), default=0) > 1
        plain, joined = (simulate(fused(program, order, one, all_reduce_s, lambda _: 0.0)) for one in (ALONE, sums))
        assert joined.makespan_s <= plain.makespan_s + 1e-9
        never = fuse(program, order, all_reduce_s, may_join=lambda a, b: False)
        assert all(len(group) == 1 for group in never.groups)
        dear = fuse(program, order, all_reduce_s, copy_s=lambda nbytes: 1.0)
        assert all(len(group) == 1 for group in dear.groups)
    assert most > 8


@pytest.mark.parametrize("copy_s", [0.0, 1e-10])
def test_trials_are_simulations_of_the_joined_program(copy_s):
    """Whatever group is open, closed ones before it, alone ones behind: the same makespan."""
    tried = 0
    for seed in range(6):
        program = backward(seed)
        order = replace_all_reduces(program, ordered(program))
        sums = [number for number in order if program[number].kind == ALL_REDUCE]
        prices = (lambda nbytes: 0.9e-6 * nbytes, lambda nbytes: copy_s * nbytes)
        for cut in range(0, len(sums) - 3, 3):
            first, second = sums[cut : cut + 1 + cut % 2], sums[cut + 1 + cut % 2 : cut + 4]
            trials = Trials(program, order, *prices)
            trials.close((), first[0])
            trials.close(first, second[0])
            groups = Sums((*((number,) for number in sums[:cut]), tuple(first), tuple(second)))
            wanted = simulate(fused(program, order, groups, *prices)).makespan_s
            assert trials.makespan_s(second) == pytest.approx(wanted, rel=1e-12)
            tried += 1
    assert tried > 6


@pytest.fixture(scope="module")
def step():
    """A small model's step on two ranks."""
    group = described_group(2)
    model = model_of(SMALL, group, "meta")
    return with_gradient_sync(capture(model, data_of(SMALL, device="meta")), group)


@pytest.mark.parametrize("switches", [Switches(*on) for on in itertools.product((False, True), repeat=3)])
def test_the_pass_keeps_the_graph(step, switches):
    """The same operators but for joined sums; a wait for each launch, behind it; all off is the graph as it was."""
    done = schedule(step, made_up_times(), switches=switches)
    nodes = list(done.step.graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    launches = [node for node in nodes if collective_of(node)]
    waits = [node for node in nodes if is_wait(node)]
    assert {wait.args[0] for wait in waits} == set(launches)
    assert len(waits) == len(launches)
    assert all(place[wait.args[0]] < place[wait] for wait in waits)
    before = [node for node in step.graph.nodes if collective_of(node)]
    gone = sum(len(group) - 1 for group in done.sums)
    assert len(launches) == len(before) - gone
    assert (gone > 0) == switches.fuses_sums
    assert bool(done.filled) == switches.moves_weight_gradients
    if switches == Switches(False, False, False):
        assert done.before == done.after
    if switches.moves_weight_gradients:
        assert done.after.exposed_s < done.before.exposed_s


def test_weight_gradients_really_are_under_their_all_to_alls(step):
    """In the graph, between launch and wait, stands what the record says, and no activation gradient."""
    done = schedule(step, made_up_times(), exact)
    nodes = [node.name for node in done.step.graph.nodes]
    moved = 0
    for one in done.filled:
        launch = nodes.index(one.all_to_all)
        node = next(node for node in done.step.graph.nodes if node.name == one.all_to_all)
        wait = nodes.index(next(user for user in node.users if is_wait(user)).name)
        for name, _ in one.under:
            assert launch < nodes.index(name) < wait
            moved += name.startswith(("mm", "bmm"))
    backward_layers, products = len(SMALL.moe_blocks), 2
    assert moved >= products * backward_layers


def test_a_graph_without_collectives_comes_back_unchanged():
    """One rank has none."""
    group = described_group(1)
    alone = capture(model_of(SMALL, group, "meta"), data_of(SMALL, device="meta"))
    done = schedule(alone, made_up_times())
    assert done.step is alone
    assert (done.filled, done.sums) == ((), ())
