"""Pipeline parallelism composed from the costs of stages: 1F1B and its interleaved form (Narayanan et al. 2021).

p stages (ranks of the pipeline), v model chunks of each, m micro-batches. Virtual stage k = chunk x p + stage; a
micro-batch goes forward through k = 0 .. p v - 1 and backward through them in reverse. Nothing is run here: an order of
work for every stage, and when each piece of it begins and ends. The cost of composing is p v m, whatever else a job
replicates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"


class Work(NamedTuple):
    """One micro-batch in one direction through one chunk of a stage."""

    direction: str
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class StageCost:
    """What a virtual stage costs.

    Attributes:
        forward_s, backward_s: of one micro-batch.
        kept_bytes: that its forward leaves for its backward.
    """

    forward_s: float
    backward_s: float
    kept_bytes: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """When the work of a step is done.

    Attributes:
        time_s: from the first start to the last end.
        busy_s: of each stage.
        kept_bytes: the most that each stage keeps at once.
        spans: of each stage, its work in order with start and end.
    """

    time_s: float
    busy_s: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    spans: tuple[tuple[tuple[Work, float, float], ...], ...]

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait; 0 for a step that takes none."""
        whole = self.time_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def problem(stages: int, microbatches: int, chunks: int = 1) -> str | None:
    """Why there is no such schedule, naming the numbers; None when there is."""
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            return f"{name} = {value}: must be at least 1"
    if microbatches < stages:
        return f"microbatches = {microbatches} are fewer than stages = {stages}, which would never all be busy"
    if chunks > 1 and microbatches % stages:
        return f"microbatches = {microbatches} must be a multiple of stages = {stages} where stages have several chunks"
    return None


def schedule(stages: int, microbatches: int, chunks: int = 1) -> list[list[Work]]:
    """The order of work of every stage: forwards until its pipeline is full, then one of each, then backwards.

    Raises:
        ValueError: as `problem`.
    """
    reason = problem(stages, microbatches, chunks)
    if reason is not None:
        raise ValueError(reason)
    return [_order(stage, stages, microbatches, chunks) for stage in range(stages)]


def _order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Work]:
    total = microbatches * chunks
    first = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    first = min(first, total)

    def work(direction: str, place: int) -> Work:
        """Stages take p micro-batches through one chunk, then the same through the next chunk, then the next p."""
        turn, inside = divmod(place, stages * chunks)
        chunk, microbatch = divmod(inside, stages) if chunks > 1 else (0, inside)
        microbatch += turn * stages
        return Work(direction, microbatch, chunk if direction == FORWARD else chunks - 1 - chunk)

    order = [work(FORWARD, place) for place in range(first)]
    for place in range(total - first):
        order += [work(FORWARD, first + place), work(BACKWARD, place)]
    return order + [work(BACKWARD, place) for place in range(total - first, total)]


def compose(
    costs: Sequence[StageCost], stages: int, microbatches: int, chunks: int = 1, transfer_s: float = 0.0
) -> Timeline:
    """The step's timeline: work begins when its stage is free and what it needs has come.

    Args:
        costs: of the p v virtual stages, in the order of the model.
        transfer_s: until what a stage made is at the next one; the stages go on meanwhile.

    Raises:
        ValueError: as `problem`; as many costs as virtual stages.
    """
    orders = schedule(stages, microbatches, chunks)
    if len(costs) != stages * chunks:
        raise ValueError(f"{len(costs)} costs for stages = {stages} with chunks = {chunks} each")
    ends: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[Work, float, float]]] = [[] for _ in orders]
    places, free = [0] * stages, [0.0] * stages
    waiting = True
    while waiting:
        waiting, moved = False, False
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                work = order[places[stage]]
                ready = _ready(work, work.chunk * stages + stage, len(costs), ends, transfer_s)
                if ready is None:
                    waiting = True
                    break
                start = max(ready, free[stage])
                virtual = work.chunk * stages + stage
                cost = costs[virtual]
                end = start + (cost.forward_s if work.direction == FORWARD else cost.backward_s)
                ends[work.direction, work.microbatch, virtual] = free[stage] = end
                spans[stage].append((work, start, end))
                places[stage] += 1
                moved = True
        if waiting and not moved:
            raise RuntimeError("the schedule waits for itself")
    return _timeline(spans, costs, stages)


def _ready(
    work: Work, virtual: int, last: int, ends: dict[tuple[str, int, int], float], transfer_s: float
) -> float | None:
    """When what a piece of work needs has come; None while nobody knows."""
    if work.direction == FORWARD:
        if virtual == 0:
            return 0.0
        end = ends.get((FORWARD, work.microbatch, virtual - 1))
    elif virtual == last - 1:
        return ends.get((FORWARD, work.microbatch, virtual))
    else:
        end = ends.get((BACKWARD, work.microbatch, virtual + 1))
    return None if end is None else end + transfer_s


def _timeline(
    spans: Sequence[Sequence[tuple[Work, float, float]]], costs: Sequence[StageCost], stages: int
) -> Timeline:
    busy, most = [], []
    for stage, done in enumerate(spans):
        held = peak = 0.0
        for work, _, _ in done:
            kept = costs[work.chunk * stages + stage].kept_bytes
            held += kept if work.direction == FORWARD else -kept
            peak = max(peak, held)
        busy.append(sum(end - start for _, start, end in done))
        most.append(peak)
    time_s = max((done[-1][2] for done in spans if done), default=0.0)
    return Timeline(time_s, tuple(busy), tuple(most), tuple(tuple(done) for done in spans))
