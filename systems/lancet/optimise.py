"""The whole of Lancet on a step's graph: parts in the forward, then weight gradients and sums in the backward.

    done = optimise(step, profile)
    print("\\n".join(done.told))

`profile` says what the nodes of a graph cost where the step will run: measured on ranks, or priced by a description.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from moebench.systems.lancet.capture import StepGraph
from moebench.systems.lancet.in_parts import in_parts
from moebench.systems.lancet.instructions import Program
from moebench.systems.lancet.nodes import collective_of
from moebench.systems.lancet.partition import Limits, PartitionPlan, PartTimes, full_experts, plan_partition
from moebench.systems.lancet.rebuild import instructions_of
from moebench.systems.lancet.schedule import Scheduled, Switches, Times, schedule
from moebench.systems.lancet.timeline import Timeline, simulate
from moebench.workloads.errors import InputError

FEWER = (4, 2)  # rho where memory does not suffice (paper, section 7)


class DoesNotFit(InputError):
    """A step that takes more memory than there is, whatever the passes do."""


@dataclass(frozen=True)
class Prices:
    """What a graph costs.

    Attributes:
        times: of its nodes; parts: of parts of them.
        peak_bytes: the most memory that lives at once in a step, parameters included; 0 where nobody knows.
    """

    times: Times
    parts: PartTimes
    peak_bytes: int = 0


Profile = Callable[[StepGraph], Prices]


def charging_full_experts(profile: Profile) -> Profile:
    """The profile with the artifact's price of experts in parts: their full time for each."""

    def changed(step: StepGraph) -> Prices:
        prices = profile(step)
        part_s = full_experts(prices.times.node_s, prices.parts.part_s)
        return replace(prices, parts=replace(prices.parts, part_s=part_s))

    return changed


Tell = Callable[[str], None]


@dataclass(frozen=True)
class Passes:
    """Which passes are on, and their limits.

    Attributes:
        partitions: the forward in parts.
        backward: what is moved there.
        memory_bytes: what a step may take; None: anything.
    """

    partitions: bool = True
    backward: Switches = field(default_factory=Switches)
    limits: Limits = field(default_factory=Limits)
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Optimised:
    """A step after the passes.

    Attributes:
        before, after: the two timelines as the passes expect them; programs: their instructions.
        partition: ranges and numbers of parts.
        scheduled: what went under which all-to-all.
        told: what was done, and why something was left as it was, a line each.
        seconds: how long it took.
    """

    step: StepGraph
    before: Timeline
    after: Timeline
    partition: PartitionPlan | None
    scheduled: Scheduled
    told: tuple[str, ...]
    seconds: float
    programs: tuple[Program, Program]

    @property
    def most_parts(self) -> int:
        """The largest number of parts that was chosen; 1 where nothing is in parts."""
        pipelines = self.partition.pipelines if self.partition else ()
        return max((one.parts for one in pipelines), default=1)


ALL_PASSES = Passes()


def optimise(
    step: StepGraph, profile: Profile, passes: Passes = ALL_PASSES, tell: Tell = lambda line: None
) -> Optimised:
    """The step after the passes; one without collectives comes back as it is.

    Args:
        tell: called with a line for each stage, as it begins.

    Raises:
        DoesNotFit: the step does not fit into `memory_bytes`, in parts or not.
    """
    start_s = time.perf_counter()
    if not any(collective_of(node) for node in step.graph.nodes):
        return _unchanged(step, profile, start_s)
    tell("profile")
    prices = profile(step)
    _check_memory(prices, passes)
    whole = instructions_of(step, prices.times.node_s)[0]
    before = simulate(whole)
    told: list[str] = []
    partition, parted = _in_parts(step, prices, profile, passes, tell, told)
    tell("weight gradients under all-to-alls")
    scheduled = schedule(parted[0], parted[1].times, switches=passes.backward)
    told.extend(str(one) for one in scheduled.filled if one.under)
    seconds = time.perf_counter() - start_s
    programs = whole, scheduled.programs[1]
    return Optimised(scheduled.step, before, scheduled.after, partition, scheduled, tuple(told), seconds, programs)


def _in_parts(
    step: StepGraph, prices: Prices, profile: Profile, passes: Passes, tell: Tell, told: list[str]
) -> tuple[PartitionPlan | None, tuple[StepGraph, Prices]]:
    """The plan, and the step in parts with its prices; with fewer parts where memory does not suffice."""
    if not passes.partitions:
        return None, (step, prices)
    most = passes.limits.most_parts
    for rho in (most, *(fewer for fewer in FEWER if fewer < most)):
        tell(f"ranges in at most {rho} parts")
        plan = plan_partition(step, prices.times.node_s, prices.parts, replace(passes.limits, most_parts=rho))
        if not plan.pipelines:
            told.extend(plan.reasons or ("no range is shorter in parts",))
            return plan, (step, prices)
        tell(f"{len(plan.pipelines)} ranges into the graph")
        parted = in_parts(step, plan.pipelines)
        parted_prices = profile(parted)
        if passes.memory_bytes is None or parted_prices.peak_bytes <= passes.memory_bytes:
            told.extend(map(str, plan.pipelines))
            return plan, (parted, parted_prices)
        told.append(f"in at most {rho} parts the step takes {_gib(parted_prices.peak_bytes)}: too much")
    return None, (step, prices)


def _check_memory(prices: Prices, passes: Passes) -> None:
    if passes.memory_bytes is not None and prices.peak_bytes > passes.memory_bytes:
        raise DoesNotFit(
            f"memory limit of {_gib(passes.memory_bytes)}: the step takes {_gib(prices.peak_bytes)} before any pass, "
            "and no pass makes that less"
        )


def _unchanged(step: StepGraph, profile: Profile, start_s: float) -> Optimised:
    prices = profile(step)
    scheduled = schedule(step, prices.times)
    told = ("the graph has no collectives: it is left as it is",)
    timeline = scheduled.before
    seconds = time.perf_counter() - start_s
    return Optimised(step, timeline, timeline, None, scheduled, told, seconds, scheduled.programs)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
