"""One training step: on real ranks it is the step of the whole job, and the recorder sees where everything belongs."""

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.collectives.outstanding import WaitError, check_finished
from moebench.ranks.run import run_ranks
from moebench.systems.training import TrainingStep
from tests.kernels.collectives.on_ranks import OperatorNames
from tests.systems.steps_on_ranks import D, TwoExpertLayer

F = "tests.systems.steps_on_ranks:"


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("with_aux", [True, False])
@pytest.mark.parametrize("tokens", [8, 0])
def test_a_step_on_ranks_is_the_step_of_the_whole_job(world, with_aux, tokens):
    """Outputs, gradients and updated parameters equal one process that sees every token; also with no token."""
    run_ranks(F + "steps_equal_the_whole_job", world, (tokens, with_aux))


def _meta_step(size=2, **arguments):
    layer = TwoExpertLayer(described_group(size), device="meta", **arguments)
    return layer, TrainingStep(layer, layer.group, learning_rate=0.1)


def _inputs():
    return torch.zeros(4, D, device="meta", requires_grad=True), torch.zeros(4, D, device="meta")


def test_two_steps_run_the_same_operators():
    """Nothing is prepared in the first step only; gradients start from None, the input's too."""
    _, step = _meta_step()
    x, upstream = _inputs()
    seen = []
    for _ in range(2):
        with OperatorNames() as recorded:
            step(x, upstream)
        seen.append(recorded.names)
    assert seen[0] == seen[1]
    names = [n.removeprefix("moebench::") for n in seen[0] if n.startswith("moebench::")]
    exchange = ["all_to_all_start", "wait"]
    reduce = ["all_reduce_start_", "wait"]
    assert names == exchange * 4 + reduce
    assert seen[0][-1] == "aten::_foreach_add_"


def test_no_collective_on_one_rank():
    """Neither exchange nor gradient sync."""
    _, step = _meta_step(1)
    with OperatorNames() as recorded:
        step(*_inputs())
    assert not [n for n in recorded.names if n.startswith("moebench::")]


def test_expert_gradients_stay_local():
    """Only parameters without `is_expert` are in the sync's buckets."""
    layer, step = _meta_step()
    synced = {id(p) for bucket in step.sync.buckets for p in bucket}
    assert synced == {id(layer.gate), id(layer.unused)}


def test_an_exchange_that_is_never_awaited_fails_the_step_not_the_next():
    """The error names it; what a failed trace left behind is forgotten."""
    _, step = _meta_step(forgets=True)
    with pytest.raises(WaitError, match="never waited for: all_to_all_start"):
        step(*_inputs())
    check_finished()
    _, good = _meta_step()
    good(*_inputs())


def test_a_layer_that_fails_leaves_nothing_outstanding():
    """An error between start and wait passes through, and the next step is not blamed."""
    layer, step = _meta_step()
    layer.expert = torch.nn.Parameter(torch.zeros(D + 1, D + 1, device="meta"))
    with pytest.raises(RuntimeError, match="reduction dim"):
        step(*_inputs())
    check_finished()


def test_the_recorder_attributes_every_operator():
    """Root gradients are loss, buckets grad-sync, the update optimizer; no operator is without a region."""
    from moebench.trace.recorder import record_step

    layer, step = _meta_step()
    recorder = record_step(step, _inputs(), layer.parameters())
    regions = {(op.name, op.region) for op in recorder.ops}
    assert ("aten::full_like", "loss") in regions
    assert ("moebench::all_reduce_start_", "grad-sync") in regions
    assert ("aten::_foreach_copy_", "grad-sync") in regions
    assert ("aten::_foreach_add_", "optimizer") in regions
    exchanges = [op for op in recorder.ops if op.name == "moebench::all_to_all_start"]
    assert {op.region for op in exchanges} == {"exchange"}
    assert [op.phase for op in exchanges] == ["forward", "forward", "backward", "backward"]
    reduction = next(op for op in recorder.ops if op.name == "moebench::all_reduce_start_")
    assert reduction.collective.bytes_per_peer == 4 * (D + 2)
    assert [op.waits_on for op in recorder.ops if op.region == "grad-sync" and op.name == "moebench::wait"] == [
        (reduction.index,)
    ]
