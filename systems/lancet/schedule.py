"""The pass over a step's backward: weight gradients under all-to-alls, sums of gradients into gaps, sums joined.

    scheduled = schedule(step, times)
    print("\\n".join(map(str, scheduled.filled)))
    plan = plan_of(scheduled.step.graph)
"""

from collections.abc import Callable
from dataclasses import dataclass

from moebench.systems.lancet.all_reduces import ALONE, SecondsOfBytes, fuse, fused, replace_all_reduces
from moebench.systems.lancet.capture import StepGraph
from moebench.systems.lancet.instructions import ALL_TO_ALL, Program, check_order, of_kind
from moebench.systems.lancet.labels import Problem, problem_of
from moebench.systems.lancet.nodes import is_backward, value_of
from moebench.systems.lancet.order import order_of
from moebench.systems.lancet.rebuild import SecondsOfNode, instructions_of, reordered
from moebench.systems.lancet.timeline import Timeline, simulate
from moebench.systems.lancet.weight_gradients import Assignment, Filled, greedy, record


@dataclass(frozen=True)
class Times:
    """What the passes believe that things cost.

    Attributes:
        node_s: of a node that computes or launches a collective.
        all_reduce_s: of one all-reduce of so many bytes.
        copy_s: of a copy of so many bytes on the compute stream.
    """

    node_s: SecondsOfNode
    all_reduce_s: SecondsOfBytes
    copy_s: SecondsOfBytes


@dataclass(frozen=True)
class Switches:
    """Which parts of the pass are on; the artifact has all.

    Attributes:
        moves_weight_gradients: computation under all-to-alls.
        moves_sums: sums of gradients into the gaps between all-to-alls.
        fuses_sums: sums that follow each other become one where that costs no time.
    """

    moves_weight_gradients: bool = True
    moves_sums: bool = True
    fuses_sums: bool = True


ALL = Switches()


@dataclass(frozen=True)
class Scheduled:
    """A step after the pass.

    Attributes:
        filled: what went under each all-to-all; empty where nothing was moved.
        before, after: the two timelines as the pass expects them.
        sums: all-reduces that became one, by name.
        programs: the instructions of both timelines.
    """

    step: StepGraph
    filled: tuple[Filled, ...]
    before: Timeline
    after: Timeline
    sums: tuple[tuple[str, ...], ...]
    programs: tuple[Program, Program] = ((), ())


def schedule(
    step: StepGraph,
    times: Times,
    assign: Callable[[Problem], Assignment] = greedy,
    switches: Switches = ALL,
) -> Scheduled:
    """Reorder a step; one without all-to-alls comes back as it is.

    Args:
        assign: the greedy under some rules, or `moebench.systems.lancet.exact.exact`.
    """
    program, nodes = instructions_of(step, times.node_s)
    before = simulate(program)
    if not of_kind(program, ALL_TO_ALL):
        return Scheduled(step, (), before, before, (), (program, program))
    order, sums = list(range(len(program))), ALONE
    filled: tuple[Filled, ...] = ()
    if switches.moves_weight_gradients:
        problem = problem_of(program, [is_backward(node) for node in nodes])
        assignment = assign(problem)
        order, filled = order_of(program, problem, assignment), record(program, problem, assignment)
    if switches.moves_sums:
        order = replace_all_reduces(program, order)
    check_order(program, order)
    if switches.fuses_sums:
        dtypes = {number: value_of(node).dtype for number, node in enumerate(nodes) if not program[number].is_compute}
        sums = fuse(program, order, times.all_reduce_s, times.copy_s, lambda a, b: dtypes[a] == dtypes[b])
    final = fused(program, order, sums, times.all_reduce_s, times.copy_s)
    after = simulate(final)
    joined = tuple(tuple(program[number].name for number in group) for group in sums.groups if len(group) > 1)
    return Scheduled(reordered(step, nodes, order, sums), filled, before, after, joined, (program, final))
