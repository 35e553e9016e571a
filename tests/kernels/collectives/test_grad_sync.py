"""Gradient sync: DistributedDataParallel's buckets, sums equal to sums by hand, reductions inside the backward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebench.kernels.collectives.grad_sync import GradientSync, assign_buckets
from moebench.kernels.collectives.group import described_group
from moebench.kernels.collectives.outstanding import check_finished
from moebench.ranks.run import run_ranks
from tests.kernels.collectives.on_ranks import OperatorNames, reductions_start_within_the_backward

F = "tests.kernels.collectives.on_ranks:"
SIZES = st.lists(st.integers(1, 900), min_size=1, max_size=12)
LIMITS = st.integers(1, 2000)
TYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(st.lists(st.tuples(st.integers(1, 900), TYPES), min_size=1, max_size=12), LIMITS, LIMITS)
def test_buckets_are_those_of_distributed_data_parallel(kinds, first_bytes, bucket_bytes):
    """The same parameters in the same buckets in the same order, also with several dtypes."""
    params = [torch.empty(size, dtype=dtype) for size, dtype in kinds]
    backwards = params[::-1]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(backwards, [first_bytes, bucket_bytes])
    ours = assign_buckets(params, first_bytes, bucket_bytes)
    position = {id(p): i for i, p in enumerate(backwards)}
    assert [[position[id(p)] for p in bucket] for bucket in ours] == theirs


@given(SIZES, LIMITS, LIMITS)
def test_every_parameter_is_in_one_bucket(sizes, first_bytes, bucket_bytes):
    """In reverse order of registration."""
    params = [torch.empty(size) for size in sizes]
    buckets = assign_buckets(params, first_bytes, bucket_bytes)
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in reversed(params)]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("bytes_each", [(1, 1), (40, 100), (2**20, 25 * 2**20)])
def test_gradients_are_summed(world, bytes_each):
    """Over ranks, over steps, for one bucket a parameter, a few, and one for all; also where ranks skip parameters."""
    skipped = [set(), {0}, {1, 4}, {0, 1, 2, 3, 4, 5}][:world]
    run_ranks(F + "gradient_sync", world, ((5, 1, 7, 30, 2, 11), skipped, *bytes_each))


def test_parameters_that_no_rank_used_end_as_zeros():
    """All ranks agree, and the optimiser sees a gradient."""
    skipped = [{0, 2}, {0, 2}]
    run_ranks(F + "gradient_sync", 2, ((5, 1, 7), skipped, 1, 1))


def test_each_bucket_is_reduced_as_soon_as_its_last_gradient_is_there():
    """Between the products of the backward; waits and copies come at the end; the same on real ranks and meta."""
    arguments = ((3, 3, 3), 1, 1)
    meta = reductions_start_within_the_backward(described_group(2), *arguments, device="meta")
    backward, finish = meta
    products = [i for i, n in enumerate(backward) if n == "aten::mm"]
    starts = [i for i, n in enumerate(backward) if n == "moebench::all_reduce_start_"]
    assert len(starts) == 3
    assert starts[0] < products[-1]
    assert "moebench::wait" not in backward
    assert [n for n in finish if n.startswith("moebench::")] == ["moebench::wait"] * 3
    real = run_ranks(F + "reductions_start_within_the_backward", 2, arguments)[1]
    assert real == meta


def test_one_rank_does_nothing():
    """No hook, no copy, no collective."""
    param = torch.ones(3, requires_grad=True)
    sync = GradientSync([param], described_group(1))
    with OperatorNames() as recorded:
        sync.finish()
    assert recorded.names == []
    assert sync.buckets == []
    param.sum().backward()
    sync.finish()
    assert torch.equal(param.grad, torch.ones(3))


def test_parameters_that_need_no_gradient_are_left_out():
    """They have none to sum."""
    frozen, trained = torch.ones(3, device="meta"), torch.ones(3, device="meta", requires_grad=True)
    assert [[p is trained for p in b] for b in GradientSync([frozen, trained], described_group(2)).buckets] == [[True]]


def test_a_second_backward_without_finish_is_an_error():
    """Its sum would miss the second gradient."""
    param = torch.ones(3, device="meta", requires_grad=True)
    sync = GradientSync([param], described_group(2))
    param.sum().backward()
    with pytest.raises(RuntimeError, match="came twice"):
        param.sum().backward()
    sync.finish()
    check_finished()


def test_removed_hooks_listen_no_more():
    """After `remove`, backwards launch nothing."""
    param = torch.ones(3, device="meta", requires_grad=True)
    GradientSync([param], described_group(2)).remove()
    with OperatorNames() as recorded:
        param.sum().backward()
    assert not [n for n in recorded.names if n.startswith("moebench::")]
