"""Pipeline parallelism composed from the costs of stages: 1F1B and its interleaved form (Narayanan et al. 2021).

p stages (ranks of the pipeline), v model chunks of each, m micro-batches. Virtual stage k = chunk x p + stage; a
micro-batch goes forward through k = 0 .. p v - 1 and backward through them in reverse. Nothing is run here: an order of
work for every stage, and when each piece of it begins and ends. The cost of composing is p v m, whatever else a job
replicates. Times may be arrays: the orders do not depend on them, so that all draws are composed at once.

Combined, a stage runs the forward of one micro-batch and the backward of another as one piece of work between filling
and draining the pipeline, and one more forward comes before, so that neither needs the other (Megatron-LM's combined
1F1B, `get_pp_rank_microbatches`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

Seconds = Any  # a number, or an array [N] of one a draw
FORWARD, BACKWARD = "forward", "backward"
MOST_WORK = 2**17


class Work(NamedTuple):
    """One micro-batch in one direction through one chunk of a stage."""

    direction: str
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class StageCost:
    """What a virtual stage costs; seconds are numbers, or arrays [N] of one number a draw.

    Attributes:
        forward_s, backward_s: of one micro-batch.
        kept_bytes: that its forward leaves for its backward.
        opening_s: when its first forward can be done at the earliest, for what it waits for that began with the step;
            None: nothing.
        closing_s: how long its last backward takes with all that follows it, but for the backward itself beside what
            the stage computes next; None: the backward alone.
    """

    forward_s: Seconds
    backward_s: Seconds
    kept_bytes: float = 0.0
    opening_s: Seconds | None = None
    closing_s: Seconds | None = None


Piece = tuple[Work, ...]  # what a stage does at a time
Span = tuple[Piece, Seconds, Seconds]


@dataclass(frozen=True)
class Timeline:
    """When the work of a step is done.

    Attributes:
        time_s: from the first start to the last end.
        busy_s: of each stage, computing micro-batches.
        kept_bytes: the most that each stage keeps at once.
        spans: of each stage, its pieces of work in order with start and end; two are in a piece that is combined.
        free_s: of each stage, the end of its last backward; ends_s: of what follows that too.
    """

    time_s: Seconds
    busy_s: tuple[Seconds, ...]
    kept_bytes: tuple[float, ...]
    spans: tuple[tuple["Span", ...], ...]
    free_s: tuple[Seconds, ...]
    ends_s: tuple[Seconds, ...]

    @property
    def bubble(self) -> Seconds:
        """The share of all stages' time in which they do not compute micro-batches; 0 for a step that takes none."""
        whole = self.time_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if np.all(whole) else 0.0 * whole


def problem(stages: int, microbatches: int, chunks: int = 1) -> str | None:
    """Why there is no such schedule, naming the numbers; None when there is."""
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            return f"{name} = {value}: must be at least 1"
    if stages * microbatches * chunks > MOST_WORK:
        pieces = f"stages = {stages} x microbatches = {microbatches} x chunks = {chunks}"
        return f"{pieces} are more than {MOST_WORK:,} forwards, the most of a step that is composed piece by piece"
    if microbatches < stages:
        return f"microbatches = {microbatches} are fewer than stages = {stages}, which would never all be busy"
    if chunks > 1 and microbatches % stages:
        return f"microbatches = {microbatches} must be a multiple of stages = {stages} where stages have several chunks"
    return None


def schedule(stages: int, microbatches: int, chunks: int = 1, combined: bool = False) -> list[list[Piece]]:
    """The order of work of every stage: forwards until its pipeline is full, then one of each, then backwards.

    Raises:
        ValueError: as `problem`.
    """
    reason = problem(stages, microbatches, chunks)
    if reason is not None:
        raise ValueError(reason)
    return [_order(stage, stages, microbatches, chunks, combined) for stage in range(stages)]


def most_at_once(stages: int, microbatches: int, chunks: int = 1) -> int:
    """Forwards of chunks whose backwards are to come, the most that the first stage has at a time; combined or not."""
    return min(_warm_up(0, stages, chunks) + 1, microbatches * chunks)


def _warm_up(stage: int, stages: int, chunks: int) -> int:
    """Forwards before the first backward's own."""
    return stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages


def _order(stage: int, stages: int, microbatches: int, chunks: int, combined: bool) -> list[Piece]:
    total = microbatches * chunks
    first = min(_warm_up(stage, stages, chunks) + combined, total)

    def work(direction: str, place: int) -> Work:
        """Stages take p micro-batches through one chunk, then the same through the next chunk, then the next p."""
        turn, inside = divmod(place, stages * chunks)
        chunk, microbatch = divmod(inside, stages) if chunks > 1 else (0, inside)
        microbatch += turn * stages
        return Work(direction, microbatch, chunk if direction == FORWARD else chunks - 1 - chunk)

    order: list[Piece] = [(work(FORWARD, place),) for place in range(first)]
    for place in range(total - first):
        pair = work(FORWARD, first + place), work(BACKWARD, place)
        order += [pair] if combined else [pair[:1], pair[1:]]
    return order + [(work(BACKWARD, place),) for place in range(total - first, total)]


def compose(
    costs: Sequence[StageCost],
    stages: int,
    microbatches: int,
    chunks: int = 1,
    transfer_s: Seconds = 0.0,
    pairs: Mapping[tuple[int, int], Seconds] | None = None,
    shares: bool = False,
) -> Timeline:
    """The step's timeline: work begins when its stage is free and what it needs has come.

    What follows the last backwards of a stage's chunks happens chunk by chunk, one after the other.

    From the first of its last backwards on, a stage's sums are under way. Where they share the way of the transfers,
    each has half of it: a transfer from or to such a stage takes twice as long, and the sums end later by what it
    moved. That is the most it can be: sums that have not left yet, or are through, take nothing.

    Args:
        costs: of the p v virtual stages, in the order of the model.
        transfer_s: until what a stage made is at the next one; the stages go on meanwhile.
        pairs: of a combined schedule: how long the forward of one virtual stage takes with the backward of another.
        shares: whether transfers and what follows the last backwards go the same way, such as NICs.

    Raises:
        ValueError: as `problem`; as many costs as virtual stages.
    """
    orders = schedule(stages, microbatches, chunks, pairs is not None)
    if len(costs) != stages * chunks:
        raise ValueError(f"{len(costs)} costs for stages = {stages} with chunks = {chunks} each")
    progress = _Progress(costs, stages, microbatches, transfer_s, pairs or {}, shares)
    places = [0] * stages
    waiting = True
    while waiting:
        waiting, moved = False, False
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                if not progress.does(stage, order[places[stage]]):
                    waiting = True
                    break
                places[stage] += 1
                moved = True
        if waiting and not moved:
            raise RuntimeError("the schedule waits for itself")
    return progress.timeline()


class _Progress:
    """What has been done so far, and when."""

    def __init__(
        self,
        costs: Sequence[StageCost],
        stages: int,
        microbatches: int,
        transfer_s: Seconds,
        pairs: Mapping[tuple[int, int], Seconds],
        shares: bool,
    ) -> None:
        self.costs, self.stages, self.last, self.transfer_s = costs, stages, microbatches - 1, transfer_s
        self.pairs, self.shares = pairs, shares
        some = costs[0].forward_s + costs[0].backward_s + transfer_s
        zero = np.zeros_like(some) if isinstance(some, np.ndarray) else 0.0
        self.zero = zero
        self.later: Callable[[Seconds, Seconds], Seconds] = np.maximum if isinstance(some, np.ndarray) else max
        self.ends: dict[tuple[str, int, int], Seconds] = {}
        self.sums: set[int] = set()  # stages whose sums are under way
        self.beside: set[tuple[str, int, int]] = set()  # work that ended when they were
        self.lost: list[Seconds] = [zero] * stages  # by the sums of a stage, to transfers
        self.spans: list[list[Span]] = [[] for _ in range(stages)]
        self.free: list[Seconds] = [zero] * stages
        self.tails: list[Seconds] = [zero] * stages

    def does(self, stage: int, piece: Piece) -> bool:
        """The stage's next piece of work, if what it needs has come."""
        virtual = [work.chunk * self.stages + stage for work in piece]
        ready = [self._ready(work, at) for work, at in zip(piece, virtual)]
        if any(one is None for one in ready):
            return False
        for work, at in zip(piece, virtual):
            for place in self._sharing(work, at):
                self.lost[place] = self.lost[place] + self.transfer_s
        start = reduce(self.later, ready, self.free[stage])
        end = start + self._duration(piece, virtual)
        for work, at in zip(piece, virtual):
            end = self._done(stage, work, self.costs[at], end)
        for work, at in zip(piece, virtual):
            self.ends[work.direction, work.microbatch, at] = end
            if stage in self.sums:
                self.beside.add((work.direction, work.microbatch, at))
        self.free[stage] = end
        self.spans[stage].append((piece, start, end))
        return True

    def _duration(self, piece: Piece, virtual: Sequence[int]) -> Seconds:
        if len(piece) > 1:
            return self.pairs[virtual[0], virtual[1]]
        cost = self.costs[virtual[0]]
        return cost.forward_s if piece[0].direction == FORWARD else cost.backward_s

    def _done(self, stage: int, work: Work, cost: StageCost, end: Seconds) -> Seconds:
        """When it ends, if it is the first or the last of its kind in the step."""
        if work.direction == FORWARD and work.microbatch == 0 and cost.opening_s is not None:
            return self.later(end, cost.opening_s)
        if work.direction == BACKWARD and work.microbatch == self.last:
            self._close(stage, end, cost)
            self.sums.update([stage] if self.shares else [])
        return end

    def _close(self, stage: int, end: Seconds, cost: StageCost) -> None:
        if cost.closing_s is None:
            return
        after = cost.closing_s - cost.backward_s
        self.tails[stage] = self.later(end, self.tails[stage]) + after

    def _ready(self, work: Work, virtual: int) -> Seconds | None:
        """When what a piece of work needs has come; None while nobody knows."""
        before = virtual - 1 if work.direction == FORWARD else virtual + 1
        if before < 0:
            return self.zero
        if before == len(self.costs):
            return self.ends.get((FORWARD, work.microbatch, virtual))
        key = (work.direction, work.microbatch, before)
        if key not in self.ends:
            return None
        return self.ends[key] + (2 if self._sharing(work, virtual) else 1) * self.transfer_s

    def _sharing(self, work: Work, virtual: int) -> set[int]:
        """Stages whose sums share the way of what a piece of work needs."""
        before = virtual - 1 if work.direction == FORWARD else virtual + 1
        if not 0 <= before < len(self.costs):
            return set()
        sender = {before % self.stages} if (work.direction, work.microbatch, before) in self.beside else set()
        return sender | (self.sums & {virtual % self.stages})

    def timeline(self) -> Timeline:
        """Everything is done."""
        busy, most, ends = [], [], []
        for stage, done in enumerate(self.spans):
            held = peak = 0.0
            for piece, _, _ in done:
                # Of a pair, one grows layer by layer as the other goes.
                for work in reversed(piece):
                    kept = self.costs[work.chunk * self.stages + stage].kept_bytes
                    held += kept if work.direction == FORWARD else -kept
                peak = max(peak, held)
            busy.append(sum((end - start for _, start, end in done), self.zero))
            most.append(peak)
            ends.append(self.later(self.free[stage], self.tails[stage] + self.lost[stage]))
        time_s = reduce(self.later, ends, self.zero)
        return Timeline(time_s, tuple(busy), tuple(most), tuple(map(tuple, self.spans)), tuple(self.free), tuple(ends))
