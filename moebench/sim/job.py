"""The time of a training job, composed: stages replayed by themselves, micro-batches put into the pipeline's order.

Every part of a stage is replayed under all draws, then one step of the pipeline is gone through with these times, all
draws at once. All stages run the same at the same time, so that links are shared as they will be.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

import numpy as np

from moebench.program import COMPUTE, Collective, Program
from moebench.sim.catalogue import Catalogue
from moebench.sim.cost import Machine, op_costs
from moebench.sim.network import collective_time_s
from moebench.sim.replay import Replay, replay
from moebench.sim.room import StageMemory
from moebench.systems.job_interface import Spread
from moebench.systems.pipeline import FORWARD as FORWARD_WORK
from moebench.systems.pipeline import StageCost, Timeline, compose
from moebench.trace.job import BACKWARD, CLOSING, COMBINED, FORWARD, OPENING, PARTS, JobTrace
from moebench.workloads.job import JobLayout
from moebench.workloads.machine import Topology

Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PartTime:
    """One part of a stage. Arrays [N] over the draws, of the rank that ends last.

    Attributes:
        products_s: of operators that are matrix products, attention among them.
    """

    replay: Replay
    programs: tuple[Program, ...]
    products_s: np.ndarray

    @property
    def time_s(self) -> np.ndarray:
        """From start to end."""
        return self.replay.step_time_s

    @property
    def exposed_s(self) -> np.ndarray:
        """The compute stream waits for collectives."""
        return self.replay.exposed_communication_s


@dataclass(frozen=True)
class StageTime:
    """One distinct stage: its parts by name."""

    parts: Mapping[str, PartTime]

    def of_microbatch(self, what: str) -> np.ndarray:
        """`time_s`, `exposed_s` or `products_s` of a micro-batch, there and back."""
        return getattr(self.parts[FORWARD], what) + getattr(self.parts[BACKWARD], what)

    def at_the_end(self, what: str) -> np.ndarray:
        """The same of what the last backward of a step has more than others."""
        return getattr(self.parts[CLOSING], what) - getattr(self.parts[BACKWARD], what)


@dataclass(frozen=True)
class JobTime:
    """A step of a job.

    Attributes:
        stages: the distinct ones, as `JobTrace.stages`; pairs: as `JobTrace.pairs`.
        transfer_s: [N] of a micro-batch's rows to the next stage.
        timeline: of the pipeline.
        slowest: which physical stage computes longest, nominally.
    """

    trace: JobTrace
    layout: JobLayout
    stages: tuple[StageTime, ...]
    transfer_s: np.ndarray
    timeline: Timeline
    slowest: int
    pairs: Mapping[tuple[int, int], PartTime] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[int, ...]:
        """The distinct stages that the slowest physical stage runs, one a chunk."""
        return self.trace.roles[self.slowest :: self.layout.stages]

    def work(self, ends: Collection[str] = ()) -> list[tuple[PartTime, int]]:
        """What the slowest stage runs in a step: each part, and how often.

        Args:
            ends: `opening`: first forwards are those that get new parameters; `closing`: last backwards have the sums
                and the update with them. Else they are as all others.
        """
        counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        last = self.trace.spread.microbatches - 1
        for piece in self.timeline.orders[self.slowest]:
            name, end, at = (FORWARD, OPENING, 0) if piece[0].direction == FORWARD_WORK else (BACKWARD, CLOSING, last)
            if len(piece) > 1:
                name = COMBINED
            elif end in ends and piece[0].microbatch == at:
                name = end
            counts[name, tuple(self.roles[work.chunk] for work in piece)] += 1
        return [(self._part(name, roles), count) for (name, roles), count in counts.items()]

    def _part(self, name: str, roles: Sequence[int]) -> PartTime:
        return self.pairs[roles[0], roles[1]] if name == COMBINED else self.stages[roles[0]].parts[name]

    @property
    def uneven(self) -> np.ndarray:
        """[N] of the bubble, the share in which stages wait because another one computes longer."""
        busy_s, step_s = np.array(self.timeline.busy_s), self.timeline.time_s
        waits_s = (busy_s.max(axis=0) - busy_s).sum(axis=0)
        return np.where(step_s > 0, waits_s / (len(busy_s) * np.where(step_s > 0, step_s, 1)), 0.0)

    def split(self) -> dict[str, np.ndarray]:
        """Parts of the step of the stage that computes longest, which add up to it, [N] each.

        `products_s`: matrix products, attention among them. `exposed_s`: waits for collectives in flight, of the
        replicas too. `bubble_s`: waits for other stages. `rest_s`: everything else.
        """
        at = self.slowest
        own = [self.stages[role] for role in self.roles]
        busy_s, free_s, end_s = (
            of[at] for of in (self.timeline.busy_s, self.timeline.free_s, self.timeline.ends_s)
        )
        work = self.work()
        steady = {
            what: sum(count * getattr(part, what) for part, count in work)
            for what in ("time_s", "products_s", "exposed_s")
        }
        synced_s = np.clip(sum(one.at_the_end("exposed_s") for one in own), 0.0, end_s - free_s)
        found = {
            "products_s": steady["products_s"],
            "exposed_s": steady["exposed_s"] + synced_s + busy_s - steady["time_s"],
            "bubble_s": self.timeline.time_s - busy_s - (end_s - free_s),
        }
        return found | {"rest_s": self.timeline.time_s - sum(found.values())}


def composed(
    trace: JobTrace,
    layout: JobLayout,
    topology: Topology,
    values: Values,
    timelines: bool = False,
    slower_products: float = 1.0,
) -> JobTime:
    """A step under every draw.

    Args:
        timelines: whether the parts' own timelines are wanted too.
        slower_products: as of `replay`.

    Raises:
        InputError: the machine lacks a parameter.
    """
    draws = hashlib.sha256(b"".join(np.asarray(values[name]).tobytes() for name in sorted(values))).hexdigest()
    where = _Where(topology, draws, values, slower_products)
    stages = tuple(
        StageTime({part: _replayed(stage.programs[part], where, timelines) for part in PARTS}) for stage in trace.stages
    )
    nbytes = max(stage.output_bytes for stage in trace.stages)
    transfer = transfer_s(nbytes, trace.spread.ranks, layout, topology, values)
    costs = [
        StageCost(
            forward_s=stages[role].parts[FORWARD].time_s,
            backward_s=stages[role].parts[BACKWARD].time_s,
            kept_bytes=trace.stages[role].kept_bytes,
            opening_s=stages[role].parts[OPENING].time_s,
            closing_s=np.maximum(stages[role].parts[CLOSING].time_s, stages[role].parts[BACKWARD].time_s),
        )
        for role in trace.roles
    ]
    pairs = {roles: _replayed(pair.programs, where, timelines) for roles, pair in trace.pairs.items()}
    both_s = {
        (ahead, behind): pairs[role, other].time_s
        for (ahead, role), (behind, other) in product(enumerate(trace.roles), repeat=2)
        if (role, other) in pairs
    }
    timeline = compose(
        costs, layout.stages, trace.spread.microbatches, layout.chunks, transfer, both_s if pairs else None,
        shares_nics(trace.spread, layout, topology),
    )  # fmt: skip
    steady = [float(stage.of_microbatch("time_s")[0]) for stage in stages]
    work = [sum(steady[role] for role in trace.roles[place :: layout.stages]) for place in range(layout.stages)]
    return JobTime(trace, layout, stages, transfer, timeline, work.index(max(work)), pairs)


def _replayed(programs: tuple[Program, ...], where: "_Where", timelines: bool) -> PartTime:
    """A micro-batch is traced on one replica of the pipeline: it takes as long on any number of them."""
    nodes = -(-programs[0].world // where.topology.gpus_per_node)
    on_these = _Where(replace(where.topology, nodes=nodes), where.draws, where.values, where.slower_products)
    return _part_time(_Programs(programs), on_these, timelines)


@dataclass(frozen=True)
class _Where:
    """A machine under some draws; equal to others of the same content."""

    topology: Topology = field(compare=False)
    draws: str
    values: Values = field(compare=False)
    slower_products: float = 1.0
    key: tuple[object, ...] = field(init=False)

    def __post_init__(self) -> None:
        one = self.topology
        shape = (one.nodes, one.gpus_per_node, one.nics_per_node, one.link_kind)
        object.__setattr__(self, "key", (one.hardware.name, one.hardware.digest, *shape))


class _Programs:
    """Programs that equal themselves alone."""

    def __init__(self, programs: tuple[Program, ...]) -> None:
        self.programs = programs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Programs) and self.programs is other.programs

    def __hash__(self) -> int:
        return id(self.programs)


@lru_cache(maxsize=256)
def _part_time(own: _Programs, where: _Where, timelines: bool) -> PartTime:
    """Replayed once for all jobs that share it."""
    catalogue, topology = Catalogue(own.programs), where.topology
    replayed = replay(catalogue, topology, where.values, timelines, where.slower_products)
    machine = Machine(topology.hardware, where.values, topology.ranks)
    products_s = where.slower_products * _products_s(catalogue, replayed.reference, machine)
    return PartTime(replayed, own.programs, products_s)


def _products_s(catalogue: Catalogue, number: int, machine: Machine) -> np.ndarray:
    places = [
        place
        for place, op in zip(catalogue.device_of[number], catalogue.programs[number].ops)
        if op.kind == "product" and op.stream == COMPUTE
    ]
    return op_costs(catalogue.ops, machine).device_s[np.array(places, dtype=np.intp)].sum(axis=0)


def transfer_s(nbytes: int, ranks: int, layout: JobLayout, topology: Topology, values: Values) -> np.ndarray:
    """The rows of a micro-batch from the n ranks of a stage to their neighbours of the next, all ranks at once.

    Where some stages follow one another inside a node and others not, the way between nodes is taken for all.
    """
    draws = max((np.size(value) for value in values.values()), default=1)
    if layout.stages * layout.chunks == 1 or not nbytes:
        return np.zeros(draws)
    node = topology.gpus_per_node
    sender, receiver = _edge(ranks, layout, topology)
    pair = Collective("all_to_all", "pipeline", (sender, receiver), None, (0, nbytes), (0, 0))
    rows: list[tuple[Sequence[int], Sequence[int]]] = [((sender,), (0, nbytes)), ((receiver,), (0, 0))]
    return np.zeros(draws) + collective_time_s(pair, topology, values, rows, min(ranks, node))


def shares_nics(spread: Spread, layout: JobLayout, topology: Topology) -> bool:
    """Whether stages hand rows on by the NICs over which replicas sum."""
    sender, receiver = _edge(spread.ranks, layout, topology)
    return spread.replicas > 1 and sender // topology.gpus_per_node != receiver // topology.gpus_per_node


def _edge(ranks: int, layout: JobLayout, topology: Topology) -> tuple[int, int]:
    """Ranks of two stages after each other, on different nodes where some are."""
    node = topology.gpus_per_node
    edges = [(stage * ranks, (stage + 1) * ranks) for stage in range(layout.stages - 1)] or [(0, ranks)]
    return next(((a, b) for a, b in edges if a // node != b // node), edges[0])


def memory(found: JobTime) -> list[StageMemory]:
    """What the ranks of each physical stage need, first stage first."""
    trace, stages = found.trace, found.layout.stages
    needs = []
    for place in range(stages):
        own = [trace.stages[role] for role in trace.roles[place::stages]]
        held = {what: sum(getattr(one, what) for one in own) for what in ("parameters", "gradients", "states")}
        most = max(one.transient_bytes for one in own)
        roles = set(trace.roles[place::stages])
        most = max([most, *(pair.transient_bytes for both, pair in trace.pairs.items() if roles.issuperset(both))])
        kept = found.timeline.kept_bytes[place]
        needs.append(StageMemory(place, **held, activations=kept, transient=most))
    return needs
