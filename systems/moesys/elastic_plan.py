"""Which rank works on how much of which task, where tasks bring batches of unequal size (section 4.1).

One step takes a batch of every task and waits for the rank that has most samples. Four ways to seat b_t samples of T
tasks on R ranks, `SEATINGS`:

    one-each      every task gets R / T ranks, whatever its batch: the imbalance that the paper starts from
    proportional  ranks in proportion to batches, so that the largest share of a rank is smallest; with fewer ranks
                  than tasks, whole tasks are put together, the largest first, each on the rank that has least: the
                  paper's
    in-line       the samples of all tasks in one line, cut into R equal pieces: ours, balanced to one sample; a rank
                  may have parts of several tasks
    every-task    1 / R of every task on each rank: plain data parallelism, every rank holds all branches

512, 256, 128 and 128 samples on 8 ranks give 4, 2, 1 and 1 ranks, 128 samples each, proportional and in line. Where
there are fewer samples than ranks some have none: they hold what is shared, and wait.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from moebench.workloads.errors import InputError, one_of


@dataclass(frozen=True)
class Task:
    """A task and the samples that it brings to a step."""

    name: str
    samples: int


@dataclass(frozen=True)
class Share:
    """Samples `first` to `first + samples` of a task's batch.

    Attributes:
        task: its place in the list of tasks.
    """

    task: int
    first: int
    samples: int


@dataclass(frozen=True)
class Seating:
    """What every rank has, in rank order; every sample of every task is on one rank."""

    tasks: tuple[Task, ...]
    shares: tuple[tuple[Share, ...], ...]

    @property
    def samples(self) -> int:
        """Of all tasks."""
        return sum(task.samples for task in self.tasks)

    def samples_of(self, rank: int) -> int:
        """Samples of a rank in a step."""
        return sum(share.samples for share in self.shares[rank])

    @property
    def most_samples(self) -> int:
        """Of the rank that has most, which the others wait for."""
        return max(self.samples_of(rank) for rank in range(len(self.shares)))

    @property
    def balance(self) -> float:
        """Mean over the ranks of their samples, over the most: 1 where nobody waits."""
        return self.samples / len(self.shares) / self.most_samples

    def tasks_of(self, rank: int) -> tuple[int, ...]:
        """Whose branches a rank holds, ascending."""
        return tuple(sorted({share.task for share in self.shares[rank]}))

    def replicas(self, task: int) -> tuple[int, ...]:
        """Ranks that hold a task's branch, ascending."""
        return tuple(rank for rank in range(len(self.shares)) if task in self.tasks_of(rank))


def seat(tasks: Sequence[Task], ranks: int, by: str = "proportional") -> Seating:
    """Seat the tasks on the ranks.

    Args:
        by: one of `SEATINGS`.

    Raises:
        InputError: no task, two of one name, one without samples, no rank, or an unknown way or one that these numbers
            don't allow.
    """
    if by not in SEATINGS:
        raise one_of("seating", by, SEATINGS)
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) != len(names):
        raise InputError(f"tasks {', '.join(names) or '(none)'}: at least one is needed, each with a name of its own")
    for task in tasks:
        if task.samples < 1:
            raise InputError(f"task {task.name} has samples = {task.samples}: at least 1 is needed, or leave it out")
    if ranks < 1:
        raise InputError(f"ranks = {ranks}: must be at least 1")
    seats = SEATINGS[by](tasks, ranks)
    return Seating(tuple(tasks), tuple(tuple(share for share in own if share.samples) for own in seats))


def rows_sent(data: Seating, seating: Seating) -> list[list[Share]]:
    """Which samples each rank of `data` has that rank r of `seating` works on, in the order of ranks: R x R shares.

    What a rank has of a task goes to the task's ranks in equal parts, to one sample. Samples that are left over go to
    the same ones from every rank, so that ranks send alike, where none of these then has more than the fullest is
    seated for; else the next rank's go on where they ended, and nobody has more. A share of none stands where nothing
    is sent.

    Raises:
        InputError: a rank of `seating` has several tasks, or none.
    """
    ranks = len(data.shares)
    other = next((rank for rank in range(ranks) if len(seating.tasks_of(rank)) != 1), None)
    if other is not None:
        raise InputError(f"rows go to the ranks of their task, and rank {other} has tasks {seating.tasks_of(other)}")
    found = _dealt(data, seating, goes_on=False)
    fullest = max(sum(row[rank].samples for row in found) for rank in range(ranks))
    return found if fullest <= seating.most_samples else _dealt(data, seating, goes_on=True)


def _dealt(data: Seating, seating: Seating, goes_on: bool) -> list[list[Share]]:
    """As `rows_sent`; whether what is left over goes on where it ended on the rank before."""
    ranks = range(len(data.shares))
    found = [[Share(task, 0, 0) for rank in ranks for task in seating.tasks_of(rank)] for _ in ranks]
    for task in range(len(seating.tasks)):
        replicas, before = seating.replicas(task), 0  # that were left over on the ranks before
        for row, shares in zip(found, data.shares, strict=True):
            for share in (share for share in shares if share.task == task):
                each, over = divmod(share.samples, len(replicas))
                first = share.first
                for place, rank in enumerate(replicas):
                    samples = each + ((place - before) % len(replicas) < over)
                    row[rank] = Share(task, first, samples)
                    first += samples
                before += over * goes_on
    return found


Shares = Sequence[tuple[Share, ...]]


def _one_each(tasks: Sequence[Task], ranks: int) -> Shares:
    each, rest = divmod(ranks, len(tasks))
    if rest or not each:
        raise InputError(f"seating one-each: ranks = {ranks} must be a multiple of tasks = {len(tasks)}")
    return [(share,) for task in range(len(tasks)) for share in _split(tasks, task, each)]


def _proportional(tasks: Sequence[Task], ranks: int) -> Shares:
    if ranks < len(tasks):
        return _put_together(tasks, ranks)
    counts = [1] * len(tasks)

    def most_of_a_rank(task: int) -> tuple[int, float]:
        return -(-tasks[task].samples // counts[task]), tasks[task].samples / counts[task]

    for _ in range(ranks - len(tasks)):
        # The next rank goes where a rank has most; no other choice gives a smaller largest share.
        counts[max(range(len(tasks)), key=most_of_a_rank)] += 1
    return [(share,) for task, count in enumerate(counts) for share in _split(tasks, task, count)]


def _put_together(tasks: Sequence[Task], ranks: int) -> Shares:
    found: list[list[Share]] = [[] for _ in range(ranks)]
    for task in sorted(range(len(tasks)), key=lambda t: -tasks[t].samples):
        least = min(found, key=lambda shares: sum(share.samples for share in shares))
        least.append(Share(task, 0, tasks[task].samples))
    return [tuple(sorted(shares, key=lambda share: share.task)) for shares in found]


def _in_line(tasks: Sequence[Task], ranks: int) -> Shares:
    ends = list(accumulate(task.samples for task in tasks))
    cuts = [rank * ends[-1] // ranks for rank in range(ranks + 1)]
    found = []
    begins = [end - task.samples for end, task in zip(ends, tasks, strict=True)]
    for first, end in pairwise(cuts):
        parts = [(max(first, begin), min(end, stop)) for begin, stop in zip(begins, ends, strict=True)]
        found.append(tuple(Share(t, a - begins[t], b - a) for t, (a, b) in enumerate(parts) if b > a))
    return found


def _every_task(tasks: Sequence[Task], ranks: int) -> Shares:
    columns = [_split(tasks, task, ranks) for task in range(len(tasks))]
    return [tuple(column[rank] for column in columns) for rank in range(ranks)]


def _split(tasks: Sequence[Task], task: int, count: int) -> list[Share]:
    """A task's batch on so many ranks, equal to one sample."""
    cuts = [part * tasks[task].samples // count for part in range(count + 1)]
    return [Share(task, first, end - first) for first, end in pairwise(cuts)]


SEATINGS: Mapping[str, Callable[[Sequence[Task], int], Shares]] = {
    "one-each": _one_each,
    "proportional": _proportional,
    "in-line": _in_line,
    "every-task": _every_task,
}
