"""The pass over a step's forward: which ranges around each MoE layer to compute in parts, and in how many.

    plan = plan_partition(step, times, part_times)
    print("\\n".join(map(str, plan.pipelines)))

It decides; `in_parts` rewrites the graph.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from moebench.systems.lancet.axes import IRREGULAR, WHOLE, Split, data_of, infer_axes, inputs_of
from moebench.systems.lancet.blocks import blocks_of
from moebench.systems.lancet.capture import StepGraph
from moebench.systems.lancet.instructions import ALL_TO_ALL, Program, of_kind
from moebench.systems.lancet.nodes import collective_of, is_backward, is_wait, region_of, value_of
from moebench.systems.lancet.pipeline import cut, pipeline
from moebench.systems.lancet.ranges import Cost, best_parts, choose, common_counts, group
from moebench.systems.lancet.rebuild import SecondsOfNode, instructions_of
from moebench.systems.lancet.timeline import simulate

_APART = ("gate", "dispatch", "combine")  # regions at whose ends a group ends


@dataclass(frozen=True)
class PartTimes:
    """What parts are believed to cost.

    Attributes:
        part_s: of a node and a number of parts: one part of it. For an irregular all-to-all the paper takes the time
            of an even one of C / k slots; the artifact charges an expert's product in full for every part.
        merge_s: of the bytes of a value that is split inside a range and read behind it: putting it together.
    """

    part_s: Callable[[fx.Node, int], float]
    merge_s: Callable[[int], float]


@dataclass(frozen=True)
class Limits:
    """Of the search (paper, section 7).

    Attributes:
        most_parts: rho.
        groups_between: groups between two MoE layers; it sets the time of a group.
        group_s: time of a group, instead.
        longest: groups of a range; None: as far as from one MoE layer to the next.
    """

    most_parts: int = 8
    groups_between: int = 5
    group_s: float | None = None
    longest: int | None = None


@dataclass(frozen=True)
class Pipeline:
    """A range that is to be computed in parts.

    Attributes:
        nodes: names of the nodes, in order, waits included.
        axes: of each value by name, where it is split.
        whole_s, parts_s: predicted times without and with parts.
    """

    nodes: tuple[str, ...]
    parts: int
    axes: Mapping[str, Split]
    whole_s: float
    parts_s: float

    def __str__(self) -> str:
        """`native_layer_norm_1 to add_5 in 4 parts: 12.10 -> 9.30 ms`."""
        times = f"{1e3 * self.whole_s:.2f} -> {1e3 * self.parts_s:.2f} ms"
        return f"{self.nodes[0]} to {self.nodes[-1]} in {self.parts} parts: {times}"


@dataclass(frozen=True)
class PartitionPlan:
    """What the pass decided.

    Attributes:
        pipelines: in order; empty where nothing gets shorter.
        before_s, after_s: predicted time of the forward.
        evaluated: ranges that were examined, those of equal layers once.
        reasons: where nothing is in parts, why not, the most frequent reason first.
    """

    pipelines: tuple[Pipeline, ...]
    before_s: float
    after_s: float
    groups: int
    evaluated: int
    reasons: tuple[str, ...] = ()


DEFAULT_LIMITS = Limits()


def plan_partition(
    step: StepGraph, node_s: SecondsOfNode, part_times: PartTimes, limits: Limits = DEFAULT_LIMITS
) -> PartitionPlan:
    """The best ranges and numbers of parts of a step's forward; none where there is no all-to-all.

    Raises:
        InputError: ortools is not installed.
    """
    search = _Search(step, node_s, part_times, limits)
    if not search.blocks:
        none = ("no all-to-all in the forward",)
        return PartitionPlan((), search.forward_s, search.forward_s, len(search.groups), 0, none)
    chosen = choose(len(search.groups), search.longest, search.cost)
    pipelines = tuple(search.pipeline(one.first, one.end, one.cost) for one in chosen if one.cost.parts > 1)
    after_s = sum(one.cost.seconds for one in chosen)
    reasons = () if pipelines else tuple(reason for reason, _ in search.reasons.most_common())
    return PartitionPlan(pipelines, search.forward_s, after_s, len(search.groups), len(search.known), reasons)


class _Search:
    def __init__(self, step: StepGraph, node_s: SecondsOfNode, part_times: PartTimes, limits: Limits) -> None:
        self._part_times, self._limits = part_times, limits
        program, nodes = instructions_of(step, node_s)
        forward = next((at for at, node in enumerate(nodes) if is_backward(node)), len(nodes))
        self._program, self._nodes = program[:forward], nodes[:forward]
        self._data = data_of(step.graph, len(step.parameters))
        self._time_s = {node: one.time_s for node, one in zip(self._nodes, self._program)}
        self._descriptions: dict[fx.Node, tuple[object, ...]] = {}
        self.forward_s = simulate(self._program).makespan_s
        self.blocks = self._blocks()
        self.groups = self._groups()
        self.longest = limits.longest or self._between_layers()
        self.known: dict[object, Cost] = {}
        self.reasons: Counter[str] = Counter()

    def cost(self, first: int, end: int) -> Cost:
        """Of a range of groups."""
        begin, stop = self.groups[first][0], self.groups[end - 1][1]
        key = self._signature(begin, stop)
        if key not in self.known:
            self.known[key] = self._examined(begin, stop)
        return self.known[key]

    def pipeline(self, first: int, end: int, cost: Cost) -> Pipeline:
        """What the plan says of a range in parts."""
        begin, stop = self.groups[first][0], self.groups[end - 1][1]
        inside = self._with_waits(begin, stop)
        axes = infer_axes(inside, self._data) or {}
        whole_s = simulate(cut(self._program, begin, stop)).makespan_s
        names = tuple(node.name for node in inside)
        return Pipeline(names, cost.parts, {node.name: axis for node, axis in axes.items()}, whole_s, cost.seconds)

    def _examined(self, begin: int, stop: int) -> Cost:
        program = cut(self._program, begin, stop)
        whole_s = simulate(program).makespan_s
        if not of_kind(program, ALL_TO_ALL):
            return Cost(whole_s)
        inside = self._with_waits(begin, stop)
        axes = infer_axes(inside, self._data)
        found = "no split runs through all of a range" if axes is None else blocks_of(inside, axes)
        if axes is None or isinstance(found, str):
            self.reasons[str(found)] += 1
            return Cost(whole_s)
        sizes = {_size(node, axis) for node, axis in axes.items() if axis not in (WHOLE, IRREGULAR)}
        counts = common_counts(sorted(sizes), self._limits.most_parts)
        if not counts:
            most = self._limits.most_parts
            self.reasons[f"no number of parts up to {most} divides {min(sizes)} into two and more"] += 1
            return Cost(whole_s)
        merge_s = self._merges(begin, program, axes)
        split = [self._nodes[begin + number] in axes for number in range(len(program))]

        def part_s(number: int, parts: int) -> float:
            if not split[number] or program[number].time_s == 0:
                return 0.0
            return self._part_times.part_s(self._nodes[begin + number], parts)

        weights_s = sum(one.time_s for one, is_split in zip(program, split) if not is_split)
        best = best_parts(
            whole_s, counts, lambda parts: pipeline(program, parts, part_s, merge_s).makespan_s + weights_s
        )
        if best.parts == 1:
            self.reasons["no range is shorter in parts"] += 1
        return best

    def _merges(self, begin: int, program: Program, axes: Mapping[fx.Node, Split]) -> dict[int, float]:
        """Of the numbers whose values are read behind the range, the backward among the readers; waits count for their
        collectives.
        """
        own = set(self._with_waits(begin, begin + len(program)))
        seconds: dict[int, float] = {}
        for number in range(len(program)):
            launched = self._nodes[begin + number]
            is_launch = collective_of(launched) is not None
            for node in (user for user in launched.users if is_wait(user)) if is_launch else (launched,):
                value = node.meta["val"]
                is_read = axes.get(node, WHOLE) != WHOLE and any(user not in own for user in node.users)
                if is_read and not isinstance(value, (tuple, list)):
                    seconds[number] = self._part_times.merge_s(value.nbytes)
        return seconds

    def _with_waits(self, begin: int, stop: int) -> list[fx.Node]:
        """The nodes of a range, each wait behind its launch."""
        found: list[fx.Node] = []
        for node in self._nodes[begin:stop]:
            found.append(node)
            if collective_of(node):
                found.extend(user for user in node.users if is_wait(user))
        return found

    def _blocks(self) -> list[tuple[int, int]]:
        """(first, end) from each dispatching all-to-all to the one that it leads to."""
        calls = of_kind(self._program, ALL_TO_ALL)
        return [(first, second + 1) for first, second in zip(calls[::2], calls[1::2])]

    def _groups(self) -> list[tuple[int, int]]:
        regions = [region_of(node) for node in self._nodes]
        edges = [
            at for at in range(1, len(regions))
            if regions[at] != regions[at - 1] and (regions[at] in _APART or regions[at - 1] in _APART)
        ]
        ends = [end for _, end in group(self._program, self._group_s(), self.blocks, edges)]
        ends = sorted({self._behind_results(end) for end in ends})
        return list(zip([0, *ends], ends))

    def _behind_results(self, at: int) -> int:
        """The first instruction from `at` on that is not one of several results of the one before."""
        while at < len(self._nodes) and self._nodes[at].target is operator.getitem:
            at += 1
        return at

    def _group_s(self) -> float:
        if self._limits.group_s is not None:
            return self._limits.group_s
        start, end = (0, len(self._program)) if len(self.blocks) < 2 else (self.blocks[0][1], self.blocks[1][0])
        return simulate(cut(self._program, start, end)).makespan_s / self._limits.groups_between

    def _between_layers(self) -> int:
        """Groups from one MoE layer's exchange to the next one's."""
        starts = [first for first, _ in self.groups]
        if len(self.blocks) < 2:
            return max(1, len(starts))
        return starts.index(self.blocks[1][0]) - starts.index(self.blocks[0][0])

    def _signature(self, begin: int, stop: int) -> object:
        """Equal for ranges that are the same work on the same shapes, read in the same way."""
        inside = self._with_waits(begin, stop)
        place = {node: at for at, node in enumerate(inside)}
        return tuple(
            (
                node.target,
                self._described(node),
                self._time_s.get(node, 0.0),
                tuple(place.get(source, (self._described(source), source in self._data)) for source in inputs_of(node)),
                any(user not in place for user in node.users),
            )
            for node in inside
        )

    def _described(self, node: fx.Node) -> tuple[object, ...]:
        """Shapes and dtypes of a node's results."""
        if node not in self._descriptions:
            values = [node.meta["val"]]
            while any(isinstance(value, (tuple, list)) for value in values):
                values = [one for value in values for one in (value if isinstance(value, (tuple, list)) else (value,))]
            self._descriptions[node] = tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in values)
        return self._descriptions[node]


def _size(node: fx.Node, axis: Split) -> int:
    value = node.meta["val"]
    while isinstance(value, (tuple, list)):
        value = value[0]
    return int(value.shape[axis])


def even_part_s(node_s: SecondsOfNode, latency_s: float) -> Callable[[fx.Node, int], float]:
    """Parts of a node whose time is a latency and a share that parts divide.

    Args:
        latency_s: of every launch.
    """

    def part_s(node: fx.Node, parts: int) -> float:
        return latency_s + max(0.0, node_s(node) - latency_s) / parts

    return part_s


def full_experts(node_s: SecondsOfNode, part_s: Callable[[fx.Node, int], float]) -> Callable[[fx.Node, int], float]:
    """`part_s`, but that experts' products take their full time in every part, as the artifact has it."""

    def charged_s(node: fx.Node, parts: int) -> float:
        is_expert = region_of(node) == "experts" and value_of(node).dim() == 3
        return node_s(node) if is_expert else part_s(node, parts)

    return charged_s
