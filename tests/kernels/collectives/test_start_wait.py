"""Start/Wait collectives: right on real ranks, the same operators everywhere, in the order that overlaps."""

import pytest
import torch
from torch.library import opcheck

from moebench.kernels.collectives import operators
from moebench.kernels.collectives import outstanding as registry
from moebench.kernels.collectives import start_wait as sw
from moebench.kernels.collectives.group import described_group
from moebench.kernels.collectives.outstanding import WaitError, check_finished, forget_described, outstanding
from moebench.ranks.run import RanksError, run_ranks
from tests.kernels.collectives import on_ranks

F = "tests.kernels.collectives.on_ranks:"
META = torch.device("meta")


@pytest.fixture(autouse=True)
def _nothing_left():
    """No test leaves a collective behind."""
    yield
    check_finished()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("check", ["even_exchange_of_types", "same_as_torch", "gradients_same_as_torch"])
def test_collectives_are_right_on_real_ranks(check, world):
    """Values as torch.distributed gives them, gradients as torch.distributed.nn does."""
    run_ranks(F + check, world)


@pytest.mark.parametrize("world", [2, 4, 10])
def test_uneven_exchanges_deliver_every_row(world):
    """Tables of splits with zeros, silent ranks and empty ranks; ten ranks take gloo's own all-to-all."""
    run_ranks(F + "uneven_exchanges", world, (12,))


@pytest.mark.parametrize("world", [4, 10])
def test_float8_travels(world):
    """gloo refuses float8; its bytes go through."""
    run_ranks(F + "exchange_of_float8", world)


@pytest.mark.parametrize(
    "check", ["several_under_way", "start_returns_before_the_peers_send", "buffers_outlive_their_names"]
)
def test_collectives_under_way_are_independent(check):
    """Waits come in any order, starts do not block, buffers stay theirs."""
    run_ranks(F + check, 4)


@pytest.mark.parametrize("world", [2, 4, 10])
def test_results_are_held_by_nobody_else(world):
    """No thread of the backend still refers to a result that was waited for, so runs execute the same operators."""
    run_ranks(F + "results_are_held_by_nobody_else", world, (30 if world < 10 else 5,))


def test_groups_within_the_world():
    """Subgroups, contiguous and strided, translate their ranks."""
    run_ranks(F + "groups_within", 4, (([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 3]),))


def test_a_rank_that_fails_between_start_and_wait_is_named():
    """Its peers do not hang."""
    with pytest.raises(RanksError, match=r"rank 1 raised:[\s\S]*ValueError: between start and wait"):
        run_ranks(F + "failed_peer", 4)


def _significant(names):
    return [n.split("::")[1] for n in names if n in ("aten::mm",) or n.startswith("moebench::")]


def test_work_between_start_and_wait_runs_between_them_in_both_directions(fake_world):
    """Forward: start, products, wait; backward: start, the products' gradients, wait; on real ranks and on meta."""
    real = run_ranks(F + "operator_order", 2)[0]
    forward, backward = map(_significant, real)
    assert forward == ["all_to_all_start", "mm", "mm", "wait"]
    assert backward == ["all_to_all_start", "mm", "mm", "mm", "mm", "wait"]
    meta = on_ranks.operator_order(described_group(2), META)
    assert [_significant(names) for names in meta] == [forward, backward]
    assert meta[0] == real[0]
    with fake_world(2) as group:
        assert on_ranks.operator_order(group) == real


@pytest.mark.parametrize("rank", [0, 3])
def test_every_collective_is_one_node_the_same_on_cpu_and_meta(rank, fake_world):
    """Real ranks, the fake group and a described one record the same operators and shapes."""
    meta = on_ranks.every_collective(described_group(4, rank), META)
    assert run_ranks(F + "every_collective", 4, ("cpu",))[rank] == meta
    with fake_world(4, rank) as group:
        assert on_ranks.every_collective(group, "cpu") == meta
    names = [n for n in meta[0] if n.startswith("moebench::")]
    kinds = ["all_to_all", "all_to_all", "all_gather", "reduce_scatter", "all_reduce"]
    expected = [f"moebench::{n}" for k in kinds for n in (f"{k}_start", "wait")]
    assert names[:10] == expected
    assert names.count("moebench::wait") == 11
    assert not [n for n in meta[0] if n.startswith(("c10d", "_c10d"))]


def test_a_strided_tensor_is_copied_by_an_operator_of_its_own():
    """The copy is seen and priced; the collective itself takes contiguous tensors only."""
    x = torch.zeros(3, 4, device=META).t()
    with on_ranks.OperatorNames() as recorded:
        sw.all_to_all(x, described_group(4))
    assert recorded.names == ["aten::clone", "moebench::all_to_all_start", "moebench::wait"]


def test_no_gradient_no_backward_collective():
    """Neither an input without gradient nor `no_grad` launches anything in a backward."""
    group = described_group(4)
    w = torch.zeros(3, 3, device=META, requires_grad=True)
    y = sw.all_to_all(torch.zeros(4, 3, device=META), group) @ w
    with on_ranks.OperatorNames() as recorded:
        y.backward(torch.zeros_like(y))
    assert not [n for n in recorded.names if n.startswith("moebench::")]
    with torch.no_grad():
        assert not sw.all_to_all(torch.zeros(4, 3, device=META, requires_grad=True), group).requires_grad


@pytest.mark.parametrize("size", [1, 3, 1024])
def test_any_size_runs_on_the_fake_group(size, fake_world):
    """On CPU tensors without peers, with finite values, forward and backward."""
    with fake_world(size, size // 2) as group:
        sent = [n % 3 for n in range(size)]
        received = [(n + 1) % 3 for n in range(size)] if size > 1 else sent
        x = torch.ones(sum(sent), 2, requires_grad=True)
        y = sw.all_to_all(x, group, sent, received)
        assert y.shape == (sum(received), 2)
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert torch.isfinite(y).all()
        assert torch.isfinite(x.grad).all()
        assert sw.all_gather(torch.ones(2, 2), group).shape == (2 * size, 2)
        assert sw.reduce_scatter(torch.ones(2 * size, 2), group).shape == (2, 2)
        assert torch.equal(sw.all_reduce(torch.ones(3), group), torch.ones(3))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0,)])
def test_empty_tensors_are_waited_for_like_others(device, shape, fake_world):
    """Zero rows or columns: right shapes, one wait each."""
    with fake_world(4) as group:
        x = torch.ones(shape, device=device, requires_grad=True)
        pendings = [sw.start_all_to_all(x, group), sw.start_all_gather(x, group), sw.start_reduce_scatter(x, group)]
        pendings.append(sw.start_all_reduce(x, group))
        assert len(outstanding()) == 4
        rows = shape[0]
        results = [pending.wait() for pending in reversed(pendings)]
        assert [y.shape[0] for y in results] == [rows, rows // 4, rows * 4, rows]
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        assert x.grad.shape == x.shape


def test_one_rank_exchanges_nothing():
    """The very tensor comes back, without an operator."""
    group = described_group(1)
    x = torch.ones(4, 2)
    with on_ranks.OperatorNames() as recorded:
        results = [sw.all_to_all(x, group), sw.all_to_all(x, group, [4], [4]), sw.all_gather(x, group)]
        results += [sw.reduce_scatter(x, group), sw.all_reduce(x, group), sw.start_all_reduce_(x, group).wait()]
    assert all(y is x for y in results)
    assert recorded.names == []


def test_waiting_twice_is_an_error():
    """By the Pending, and by the operator below it."""
    group = described_group(4)
    pending = sw.start_all_to_all(torch.ones(4, 2, device=META), group)
    y = pending.wait()
    with pytest.raises(WaitError, match="before"):
        pending.wait()
    with pytest.raises(WaitError, match="no collective is outstanding"):
        operators.wait(y, group.key)


def test_a_start_that_is_never_awaited_is_found():
    """Named with its shape; forgotten only on request."""
    before = outstanding()
    pending = sw.start_all_gather(torch.ones(2, 3, device=META), described_group(4))
    with pytest.raises(WaitError, match=r"never waited for: all_gather_start of shape \(8, 3\)"):
        check_finished(before)
    forget_described(before)
    check_finished(before)
    del pending


def test_a_described_group_takes_meta_tensors_only():
    """The error says how to get a real one."""
    with pytest.raises(ValueError, match=r"only described.*process_group\(\)"):
        sw.all_to_all(torch.ones(4, 2), described_group(4))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, g: sw.all_to_all(x[:7], g), "7 rows are not a multiple of 4 ranks"),
        (lambda x, g: sw.reduce_scatter(x[:7], g), "7 rows are not a multiple of 4 ranks"),
        (lambda x, g: sw.all_to_all(x, g, [8, 0, 0, 0]), "both"),
        (lambda x, g: sw.all_to_all(x, g, [8, 0, 0], [1, 1, 1, 1]), "input_splits has 3 entries"),
        (lambda x, g: sw.all_to_all(x, g, [8, 0, 0, 0], [1, 1, 1, 1, 1]), "output_splits has 5 entries"),
        (lambda x, g: sw.all_to_all(x, g, [9, -1, 0, 0], [1, 1, 1, 1]), "negative"),
        (lambda x, g: sw.all_to_all(x, g, [1, 1, 1, 1], [2, 2, 2, 2]), "input_splits sum to 4, the tensor has 8 rows"),
        (lambda x, g: sw.all_gather(x.sum(), g), "at least one dimension"),
        (lambda x, g: sw.start_all_reduce_(x.t(), g), "contiguous"),
        (lambda x, g: sw.all_to_all(x, described_group(1), [8], [7]), "sends 8 rows to itself and expects 7"),
    ],
)
def test_calls_without_meaning_are_refused(call, words):
    """Before anything is sent."""
    with pytest.raises(ValueError, match=words):
        call(torch.ones(8, 2, device=META), described_group(4))


def test_operators_pass_opcheck(fake_world):
    """Schema, fake implementation and graph dispatch agree. `wait` is left out: it returns its argument on purpose."""
    with fake_world(4) as group:
        x = torch.randn(8, 3)
        opcheck(operators.all_to_all_start, (x, [], [], group.key))
        opcheck(operators.all_to_all_start, (x, [2, 0, 5, 1], [2, 3, 0, 4], group.key))
        for operator in (operators.all_gather_start, operators.reduce_scatter_start, operators.all_reduce_start):
            opcheck(operator, (x, group.key))
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # graphs take the functional form
        opcheck(operators.all_reduce_start_, (x, group.key), test_utils=checks)
    for key in outstanding():  # opcheck starts without waiting
        registry._outstanding.pop(key)
