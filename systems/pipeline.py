"""Pipeline parallelism composed from the costs of stages: 1F1B and its interleaved form (Narayanan et al. 2021).

p stages (ranks of the pipeline), v model chunks of each, m micro-batches. Virtual stage k = chunk x p + stage; a
micro-batch goes forward through k = 0 .. p v - 1 and backward through them in reverse. Nothing is run here: an order of
work for every stage, and when each piece of it begins and ends. The cost of composing is p v m, whatever else a job
replicates. Times may be arrays: the orders do not depend on them, so that all draws are composed at once, and all
stages that can work at the same time.

Combined, a stage runs the forward of one micro-batch and the backward of another as one piece of work between filling
and draining the pipeline, and one more forward comes before, so that neither needs the other (Megatron-LM's combined
1F1B, `get_pp_rank_microbatches`).
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
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
_At = tuple[str, int, int]  # direction, micro-batch, virtual stage


@dataclass(frozen=True)
class Timeline:
    """When the work of a step is done.

    Attributes:
        time_s: from the first start to the last end.
        busy_s: of each stage, computing micro-batches.
        kept_bytes: the most that each stage keeps at once.
        orders: of each stage, its pieces of work; two works are in a piece that is combined.
        free_s: of each stage, the end of its last backward; ends_s: of what follows that too.
        starts_s, stops_s: of each stage, of its pieces, one a row.
    """

    time_s: Seconds
    busy_s: tuple[Seconds, ...]
    kept_bytes: tuple[float, ...]
    orders: tuple[tuple[Piece, ...], ...]
    free_s: tuple[Seconds, ...]
    ends_s: tuple[Seconds, ...]
    starts_s: tuple[Sequence[Seconds], ...]
    stops_s: tuple[Sequence[Seconds], ...]

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Of each stage, its pieces of work in order with start and end."""
        return tuple(tuple(zip(*one)) for one in zip(self.orders, self.starts_s, self.stops_s))

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


def most_at_once(stages: int, microbatches: int, chunks: int = 1, stage: int = 0) -> int:
    """Forwards of chunks whose backwards are to come, the most that a stage has at a time, combined or not.

    So many forwards come before its first backward; in a combined schedule all others run beside one.
    """
    return min(_warm_up(stage, stages, chunks) + 1, microbatches * chunks)


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
    course = _course(stages, microbatches, chunks, pairs is not None)
    if len(costs) != stages * chunks:
        raise ValueError(f"{len(costs)} costs for stages = {stages} with chunks = {chunks} each")
    is_drawn = isinstance(costs[0].forward_s + costs[0].backward_s + transfer_s, np.ndarray)
    composed = _Composed(course, costs, transfer_s, pairs or {}, shares)
    return composed.timeline() if is_drawn else _of_numbers(composed.timeline())


@dataclass(frozen=True)
class _Course:
    """A schedule in an order that can run: level by level, the pieces of a level on different stages.

    Pieces have numbers in this order; P, the number of pieces, is that of none, which has ended at 0.

    Attributes:
        orders: of each stage, its pieces; numbers: of each stage, theirs, in order.
        levels: where they begin in the numbers, and P.
        ahead, behind: [P] virtual stage of the forward in a piece, of the backward; -1 where there is none.
        before: [P] the piece before it on its stage.
        needed: [2, P] of both works of a piece, the one that it waits for.
        is_moved: [2, P] whether that is on another virtual stage.
        owns: [2, P] whether sums of a piece's own stage are under way when it waits; sends: of the needed one's stage.
        openings, closings: pieces with a forward of the first micro-batch, with a backward of the last, in order.
    """

    orders: tuple[tuple[Piece, ...], ...]
    numbers: tuple[np.ndarray, ...]
    levels: tuple[int, ...]
    ahead: np.ndarray
    behind: np.ndarray
    before: np.ndarray
    needed: np.ndarray
    is_moved: np.ndarray
    owns: np.ndarray
    sends: np.ndarray
    openings: tuple[int, ...]
    closings: tuple[int, ...]


@lru_cache(maxsize=8)  # one of 10,000 pieces takes some megabytes
def _course(stages: int, microbatches: int, chunks: int, combined: bool) -> _Course:
    """The schedule, and what of its run does not depend on times."""
    orders = schedule(stages, microbatches, chunks, combined)
    total, virtual_stages = sum(map(len, orders)), stages * chunks
    numbers: list[list[int]] = [[] for _ in orders]
    number_of: dict[_At, int] = {}
    levels: list[int] = []
    rows: list[tuple[int, ...]] = []  # before, needed, is_moved, ahead, behind of each piece
    ends: dict[str, list[int]] = {FORWARD: [], BACKWARD: []}  # pieces with the first forwards, with the last backwards
    while len(rows) < total:
        levels.append(len(rows))
        able = _able(orders, numbers, number_of, virtual_stages)
        if not able:
            raise RuntimeError("the schedule waits for itself")
        for stage, works in able:
            number, needed, is_moved, where = len(rows), [total, total], [0, 0], {FORWARD: -1, BACKWARD: -1}
            for slot, (at, source) in enumerate(works):
                direction, microbatch, virtual = at
                where[direction] = virtual
                if source is not None:
                    needed[slot], is_moved[slot] = number_of[source], source[2] != virtual
                if microbatch == (0 if direction == FORWARD else microbatches - 1):
                    ends[direction].append(number)
            before = numbers[stage][-1] if numbers[stage] else total
            rows.append((before, *needed, *is_moved, *where.values()))
            numbers[stage].append(number)
        number_of |= {at: numbers[stage][-1] for stage, works in able for at, _ in works}
    columns = np.array(rows, dtype=np.intp).T.copy()
    before_P, needed_2P, is_moved_2P = columns[0], columns[1:3], columns[3:5].astype(bool)
    own = tuple(np.array(of_stage, dtype=np.intp) for of_stage in numbers)
    # Sums of a stage are under way from its first last backward on.
    is_late = np.zeros(total + 1, dtype=bool)
    is_late[ends[BACKWARD]] = True
    for of_stage in own:
        is_late[of_stage] = np.logical_or.accumulate(is_late[of_stage])
    return _Course(
        tuple(map(tuple, orders)), own, (*levels, total), columns[5], columns[6], before_P, needed_2P, is_moved_2P,
        is_moved_2P & is_late[before_P], is_moved_2P & is_late[needed_2P], tuple(ends[FORWARD]), tuple(ends[BACKWARD]),
    )  # fmt: skip


def _able(
    orders: Sequence[Sequence[Piece]], done: Sequence[Sequence[int]], known: Container[_At], virtual_stages: int
) -> list[tuple[int, list[tuple[_At, _At | None]]]]:
    """Stages whose next piece has what it waits for, with its works and what each of them waits for."""
    found = []
    for stage, order in enumerate(orders):
        if len(done[stage]) < len(order):
            piece = [
                (work.direction, work.microbatch, work.chunk * len(orders) + stage) for work in order[len(done[stage])]
            ]
            works = [(at, _source(at, virtual_stages)) for at in piece]
            if all(source is None or source in known for _, source in works):
                found.append((stage, works))
    return found


def _source(at: _At, virtual_stages: int) -> _At | None:
    """What a work waits for; None of the first forwards."""
    direction, microbatch, virtual = at
    if direction == FORWARD:
        return (FORWARD, microbatch, virtual - 1) if virtual else None
    return (BACKWARD, microbatch, virtual + 1) if virtual + 1 < virtual_stages else (FORWARD, microbatch, virtual)


class _Composed:
    """A course with times, [N] each: when pieces start and stop."""

    def __init__(
        self,
        course: _Course,
        costs: Sequence[StageCost],
        transfer_s: Seconds,
        pairs: Mapping[tuple[int, int], Seconds],
        shares: bool,
    ) -> None:
        self.course, self.costs, self.transfer_s, self.shares = course, costs, transfer_s, shares
        lasts = _rows(*(cost.forward_s for cost in costs), *(cost.backward_s for cost in costs), *pairs.values())
        moves_s = _rows(0.0, transfer_s, 2 * transfer_s, lasts[0])[:3]
        lasting = self._kinds(list(pairs))
        moving = np.where(course.is_moved, 1 + (shares & (course.owns | course.sends)), 0)
        opening_s = {number: costs[course.ahead[number]].opening_s for number in course.openings}
        opening_s = {number: time_s for number, time_s in opening_s.items() if time_s is not None}
        slots = range(2 if pairs else 1)
        self.starts_s = np.empty((len(lasting), lasts.shape[1]))
        self.stops_s = np.zeros((len(lasting) + 1, lasts.shape[1]))
        for begin, end in zip(course.levels, course.levels[1:]):
            start_s = self.stops_s[course.before[begin:end]]
            for slot in slots:
                ready_s = self.stops_s[course.needed[slot, begin:end]] + moves_s[moving[slot, begin:end]]
                np.maximum(start_s, ready_s, out=start_s)
            self.starts_s[begin:end] = start_s
            self.stops_s[begin:end] = start_s + lasts[lasting[begin:end]]
            for number in opening_s.keys() & range(begin, end):
                self.stops_s[number] = np.maximum(self.stops_s[number], opening_s[number])

    def _kinds(self, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
        """[P] which of forwards, backwards and pairs, in this order, a piece is."""
        ahead, behind, virtual = self.course.ahead, self.course.behind, len(self.costs)
        table = np.full((virtual + 1, virtual + 1), -1)  # the last row and column are of none
        table[:-1, -1] = np.arange(virtual)
        table[-1, :-1] = virtual + np.arange(virtual)
        for place, pair in enumerate(pairs):
            table[pair] = 2 * virtual + place
        return table[ahead, behind]

    def timeline(self) -> Timeline:
        """What they make of a step."""
        course = self.course
        starts_s, stops_s = ([of[own] for own in course.numbers] for of in (self.starts_s, self.stops_s))
        free_s = [one[-1] for one in stops_s]
        tails_s, lost_s = self._tails(), self._lost()
        ends_s = [np.maximum(free, tail + lost) for free, tail, lost in zip(free_s, tails_s, lost_s)]
        busy_s = [(stop - start).sum(axis=0) for start, stop in zip(starts_s, stops_s)]
        # Of a pair, one grows layer by layer as the other goes.
        kept = np.array([*(cost.kept_bytes for cost in self.costs), 0.0])
        grown = kept[course.ahead] - kept[course.behind]
        most = [float(grown[own].cumsum().max(initial=0.0)) for own in course.numbers]
        return Timeline(
            reduce(np.maximum, ends_s), tuple(busy_s), tuple(most), course.orders, tuple(free_s), tuple(ends_s),
            tuple(starts_s), tuple(stops_s),
        )  # fmt: skip

    def _tails(self) -> list[np.ndarray]:
        """Of each stage, the end of what follows its last backwards, one after the other."""
        tails = [np.zeros(self.stops_s.shape[1]) for _ in self.course.orders]
        for number in self.course.closings:
            virtual = self.course.behind[number]
            cost, stage = self.costs[virtual], virtual % len(tails)
            if cost.closing_s is not None:
                tails[stage] = np.maximum(self.stops_s[number], tails[stage]) + (cost.closing_s - cost.backward_s)
        return tails

    def _lost(self) -> list[np.ndarray]:
        """By the sums of each stage, to transfers."""
        course = self.course
        lost = [np.zeros(self.stops_s.shape[1]) for _ in course.orders]
        if not self.shares:
            return lost
        stage_of = np.empty(len(course.before) + 1, dtype=np.intp)
        for stage, own in enumerate(course.numbers):
            stage_of[own] = stage
        here, there = np.broadcast_to(stage_of[:-1], course.needed.shape), stage_of[course.needed]
        for stage in [*here[course.owns], *there[course.sends & ~(course.owns & (here == there))]]:
            lost[stage] = lost[stage] + self.transfer_s
        return lost


def _rows(*values: Seconds) -> np.ndarray:
    """Numbers and arrays [N] as rows of one array."""
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, values)))


def _of_numbers(timeline: Timeline) -> Timeline:
    """Of times that are numbers."""

    def plain(values: Sequence[Any]) -> tuple[float, ...]:
        return tuple(float(np.ravel(value)[0]) for value in values)

    return Timeline(
        plain([timeline.time_s])[0], plain(timeline.busy_s), timeline.kept_bytes, timeline.orders,
        plain(timeline.free_s), plain(timeline.ends_s), tuple(map(plain, timeline.starts_s)),
        tuple(map(plain, timeline.stops_s)),
    )  # fmt: skip
