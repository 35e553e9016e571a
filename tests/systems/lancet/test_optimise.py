"""The passes together, on a small model: what they do, what they leave, and what they say of it."""

from dataclasses import replace
from functools import cache

import pytest

from moebench.checks.models import made_up
from moebench.kernels.collectives.group import described_group
from moebench.ranks.run import run_ranks
from moebench.systems.lancet.capture import capture
from moebench.systems.lancet.gradient_sync import with_gradient_sync
from moebench.systems.lancet.optimise import Passes, optimise
from moebench.systems.lancet.partition import Limits
from moebench.systems.lancet.plan import plan_of
from moebench.systems.lancet.schedule import Switches
from moebench.systems.lancet.system import LANCET
from moebench.systems.model_registry import get
from moebench.workloads.errors import InputError
from tests.systems.lancet.models import SMALL, data_of, model_of


@cache
def captured(ranks, batch_size=8, sequence=12):
    """A step on paper."""
    group = described_group(ranks)
    shape = replace(SMALL, layers=2, batch_size=batch_size, sequence=sequence)
    return with_gradient_sync(capture(model_of(shape, group, "meta"), data_of(shape, device="meta")), group)


def profile(peak=lambda step: 0):
    """Made-up prices, and a made-up peak of memory."""
    priced = made_up(None, (), None)
    return lambda step: replace(priced(step), peak_bytes=peak(step))


def test_both_passes_make_the_step_shorter_and_say_what_they_did():
    """More than either alone; a line a range and an all-to-all; stages are told as they begin."""
    step, stages = captured(2), []
    done = optimise(step, profile(), tell=stages.append)
    alone = [
        optimise(step, profile(), Passes(partitions=False)),
        optimise(step, profile(), Passes(backward=Switches(moves_weight_gradients=False))),
    ]
    assert done.after.makespan_s < min(one.after.makespan_s for one in alone)
    assert alone[0].after.makespan_s < done.before.makespan_s
    assert alone[0].most_parts == 1 < done.most_parts
    assert any("parts: " in line for line in done.told)
    assert any(line.startswith("under all_to_all_start") for line in done.told)
    assert stages[0] == "profile"
    assert stages[-1].startswith("weight gradients")
    assert len(plan_of(done.step.graph).calls) > len(plan_of(step.graph).calls)


def test_ranks_measure_and_one_of_them_plans():
    """Two real ranks; the first one tells what it did, the other one loads it."""
    first, second = run_ranks("tests.systems.lancet.on_ranks:measured_plan_is_right", 2, (replace(SMALL, layers=2),))
    assert second is None
    told, before_s = first
    assert told
    assert before_s > 0


def test_a_memory_limit_asks_for_fewer_parts_or_says_that_nothing_fits():
    """In parts a step takes more here; a limit below the step itself is refused."""
    step = captured(2)

    def peak(graph):
        return 100 if graph is step else 200

    done = optimise(step, profile(peak), Passes(memory_bytes=150))
    assert done.partition is None
    assert sum("too much" in line for line in done.told) == 3  # at most 8, 4, 2 parts
    assert optimise(step, profile(peak), Passes(memory_bytes=200)).most_parts > 1
    with pytest.raises(InputError, match="before any pass"):
        optimise(step, profile(peak), Passes(memory_bytes=99))


def test_what_is_left_as_it_is_says_why():
    """No collective; no number of parts that divides the batch; a limit of one part."""
    alone = captured(1)
    done = optimise(alone, profile())
    assert done.step is alone
    assert done.told == ("the graph has no collectives: it is left as it is",)
    prime = optimise(captured(2, 1, 13), profile(), Passes(backward=Switches(False, False, False)))
    assert prime.most_parts == 1
    assert any("no number of parts up to 8 divides" in line for line in prime.told)
    one = optimise(captured(2), profile(), Passes(limits=Limits(most_parts=1)))
    assert any("up to 1" in line for line in one.told)


def test_names_say_which_passes():
    """Options of `lancet`; unknown ones and senseless values are refused."""
    passes = get("lancet+parts=false+fuses=false").options.passes
    assert (passes.partitions, passes.backward) == (False, Switches(fuses_sums=False))
    assert get("lancet+most_parts=4+longest=2").options.passes.limits == Limits(most_parts=4, longest=2)
    assert get("lancet") is LANCET
    for name, says in (
        ("lancet+parts=perhaps", "unknown parts of lancet"),
        ("lancet+groups=few", "write a whole number"),
        ("lancet+parts", "write each option once"),
        ("mystery", "unknown system for models"),
    ):
        with pytest.raises(InputError, match=says):
            get(name)
