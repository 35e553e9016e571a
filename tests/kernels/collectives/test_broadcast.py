"""Broadcast and reduce, and exchanges into parts of one tensor: right on real ranks, the same operators everywhere."""

import pytest
import torch
from torch.library import opcheck

from moebench.kernels.collectives import operators
from moebench.kernels.collectives import outstanding as registry
from moebench.kernels.collectives import start_wait as sw
from moebench.kernels.collectives.group import described_group
from moebench.kernels.collectives.outstanding import WaitError, check_finished, forget_described, outstanding
from moebench.ranks.run import run_ranks
from tests.kernels.collectives import broadcast_on_ranks

F = "tests.kernels.collectives.broadcast_on_ranks:"
META = torch.device("meta")


@pytest.fixture(autouse=True)
def _nothing_left():
    """No test leaves a collective behind."""
    yield
    check_finished()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("check", ["values_and_gradients", "types_and_shapes", "several_under_way"])
def test_broadcast_and_reduce_are_right_on_real_ranks(check, world):
    """Every root, every dtype, no rows; each is the gradient of the other; any order of waits."""
    run_ranks(F + check, world)


@pytest.mark.parametrize("world", [1, 2, 4, 10])
def test_parts_of_one_tensor_are_filled_each_by_its_exchange(world):
    """With splits of zero, parts without rows, and NaN before."""
    run_ranks(F + "parts_of_one_buffer", world, (8,))


@pytest.mark.parametrize("world", [2, 4])
def test_results_are_held_by_nobody_else(world):
    """No thread of the backend still refers to a result that was waited for."""
    run_ranks(F + "results_are_held_by_nobody_else", world, (40,))


@pytest.mark.parametrize("rank", [0, 3])
def test_each_is_one_node_the_same_on_cpu_and_meta(rank, fake_world):
    """Real ranks, the fake group and a described one record the same operators and shapes."""
    meta = broadcast_on_ranks.operators(described_group(4, rank), META)
    assert run_ranks(F + "operators", 4, ("cpu",))[rank] == meta
    with fake_world(4, rank) as group:
        assert broadcast_on_ranks.operators(group, "cpu") == meta
    names = [n.removeprefix("moebench::") for n in meta[0] if n.startswith("moebench::")]
    forward = ["broadcast_start", "wait", "reduce_start", "wait"]
    assert names == [*forward, *forward, *["all_to_all_into_start", "wait"] * 2]


def test_the_fake_group_fills_what_comes_with_numbers(fake_world):
    """Without peers: a root keeps its own, the others get zeros."""
    with fake_world(4, 1) as group:
        x = torch.ones(3, 2)
        assert torch.equal(sw.broadcast(x, group, 3, 1), x)
        assert torch.equal(sw.broadcast(x[:0], group, 3, 0), torch.zeros(3, 2))
        assert torch.equal(sw.reduce(x, group, 1), x)
        assert sw.reduce(x, group, 0).shape == (0, 2)


def test_one_rank_exchanges_nothing():
    """The very tensor comes back; into a part it is copied."""
    group, x, part = described_group(1), torch.ones(4, 2), torch.zeros(6, 2)[1:5]
    assert sw.broadcast(x, group, 4) is x
    assert sw.reduce(x, group) is x
    assert sw.start_all_to_all_into(part, x, group, [4], [4]).wait() is part
    assert torch.equal(part, x)


def test_parts_are_told_apart():
    """Each is waited for once, in any order; parts without rows too; a tensor that nobody filled is refused."""
    group, buffer = described_group(2), torch.empty(4, 3, device=META)
    rows, none = torch.empty(2, 3, device=META), torch.empty(0, 3, device=META)
    first = sw.start_all_to_all_into(buffer[:2], rows, group, [1, 1], [1, 1])
    empty = [sw.start_all_to_all_into(buffer[2:2], none, group, [0, 0], [0, 0]) for _ in range(2)]
    last = sw.start_all_to_all_into(buffer[2:], rows, group, [1, 1], [1, 1])
    assert len(outstanding()) == 4
    last.wait()
    with pytest.raises(WaitError, match="no collective is outstanding"):
        operators.wait(buffer[2:], group.key)
    with pytest.raises(WaitError, match="no collective is outstanding"):
        operators.wait(buffer, group.key)
    for pending in (*empty, first):
        pending.wait()
    with pytest.raises(WaitError, match="before"):
        first.wait()


def test_a_part_that_is_never_awaited_is_found():
    """Named with its shape."""
    before, buffer = outstanding(), torch.empty(4, 3, device=META)
    sw.start_all_to_all_into(buffer[:2], torch.empty(2, 3, device=META), described_group(2), [1, 1], [1, 1])
    with pytest.raises(WaitError, match=r"never waited for: all_to_all_into_start of shape \(2, 3\)"):
        check_finished(before)
    forget_described(before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, g: sw.broadcast(x, g, 8, 4), "root 4 is not a rank of the group, 0 to 3"),
        (lambda x, g: sw.reduce(x, g, -1), "root -1 is not a rank"),
        (lambda x, g: sw.broadcast(x, g, 7), "broadcast of 7 rows from rank 0: rank 0 holds 8, not 7"),
        (lambda x, g: sw.broadcast(x, g, 8, 1), "broadcast of 8 rows from rank 1: rank 0 holds 8, not 0"),
        (lambda x, g: sw.broadcast(x.sum(), g, 1), "at least one dimension"),
        (lambda x, g: sw.reduce(x.sum(), g), "at least one dimension"),
        (lambda x, g: sw.start_all_to_all_into(x.t(), x.t(), g, [2, 0, 0, 0], [2, 0, 0, 0]), "contiguous"),
        (lambda x, g: sw.start_all_to_all_into(x, x.clone(), g, [8, 0, 0, 0], [7, 0, 0, 0]), r"7 rows .*\(8, 2\)"),
        (lambda x, g: sw.start_all_to_all_into(x.to(torch.float64), x, g, [2] * 4, [2] * 4), "in torch.float64"),
        (lambda x, g: sw.start_all_to_all_into(x, x.clone().requires_grad_(), g, [2] * 4, [2] * 4), "need no gradient"),
    ],
)
def test_calls_without_meaning_are_refused(call, words):
    """Before anything is sent."""
    with pytest.raises(ValueError, match=words):
        call(torch.ones(8, 2, device=META), described_group(4))


def test_operators_pass_opcheck(fake_world):
    """Schema, fake implementation and graph dispatch agree."""
    with fake_world(4, 1) as group:
        x = torch.randn(8, 3)
        opcheck(operators.broadcast_start, (x, 8, 1, group.key))
        opcheck(operators.broadcast_start, (x[:0], 8, 0, group.key))
        opcheck(operators.reduce_start, (x, 1, group.key))
        opcheck(operators.reduce_start, (x, 0, group.key))
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # graphs take the functional form
        splits = [2, 2, 2, 2]
        arguments = (x, splits, splits, torch.empty(8, 3), group.key)
        opcheck(operators.all_to_all_into_start, arguments, test_utils=checks)
    registry._outstanding.clear()  # opcheck starts without waiting
