"""Operators that run as something else elsewhere, read values or hide waits are refused by name, with what to use."""

import pytest
import torch
import torch.nn.functional as F

from moebench.kernels.host import answering, read_ints
from moebench.kernels.region import region
from moebench.trace.errors import BannedOperator, TraceError
from moebench.trace.recorder import Recorder


def _adam(x, i):
    linear = torch.nn.Linear(5, 5, device=x.device)
    optimizer = torch.optim.Adam(linear.parameters())
    linear.weight.grad = torch.zeros(5, 5, device=x.device)
    optimizer.step()


def _fused_adam(x, i):
    tensors = [[torch.zeros(5, device=x.device)] for _ in range(5)]
    torch._fused_adam_(
        *tensors, [torch.ones((), device=x.device)],
        lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def _stock_all_reduce(x, i):
    torch.ops._c10d_functional.all_reduce(x, "sum", "0")


BANNED = {
    "one_hot": (lambda x, i: F.one_hot(i, 5), "explicit.one_hot"),
    "scaled_dot_product_attention": (lambda x, i: F.scaled_dot_product_attention(x, x, x), "explicit.attention"),
    "dropout": (lambda x, i: F.dropout(x), "explicit.dropout"),
    "dropout module": (lambda x, i: torch.nn.Dropout()(x), "explicit.dropout"),
    "bincount": (lambda x, i: torch.bincount(i), "explicit.count"),
    "masked_select": (lambda x, i: x.masked_select(x > 0), "torch.where"),
    "boolean index": (lambda x, i: x[x > 0], "boolean mask.*torch.where"),
    "boolean assignment": (lambda x, i: x.__setitem__(x > 0, x[0, 0]), "boolean mask"),
    "nonzero": (lambda x, i: x.nonzero(), "torch.where"),
    "where without values": (lambda x, i: torch.where(x > 0), "torch.where"),
    "unique": (lambda x, i: torch.unique(i), "unique"),
    "repeat_interleave": (lambda x, i: i.repeat_interleave(i), "repeat_interleave"),
    "item": (lambda x, i: i[0].item(), "read_ints"),
    "condition": (lambda x, i: bool(i[0] > 0), "read_ints"),
    "tolist": (lambda x, i: i.tolist(), "read_ints"),
    "cpu": (lambda x, i: i.cpu(), "read_ints"),
    "slice bound": (lambda x, i: x[: i[0]], "_local_scalar_dense.*read_ints"),
    "equal": (lambda x, i: torch.equal(x, x), "read_ints"),
    "torch.tensor": (lambda x, i: torch.tensor([1], device=x.device), "torch.full"),
    "stock optimiser": (_adam, "Adam.step.*kernels.optimizer"),
    "fused optimiser": (_fused_adam, "kernels.optimizer"),
    "stock collective": (_stock_all_reduce, "start_wait"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", BANNED)
def test_banned_operator_is_refused_with_the_explicit_form(name, device):
    """On real and on meta tensors alike, the error names what to use instead."""
    call, hint = BANNED[name]
    x, i = torch.zeros(6, 5, device=device), torch.zeros(6, dtype=torch.int64, device=device)
    with Recorder([x, i]), region("dense"), pytest.raises(BannedOperator, match=hint):
        call(x, i)


def test_masking_in_a_fixed_shape_is_allowed():
    """What the errors recommend passes."""
    x = torch.zeros(6, 5, device="meta")
    with Recorder([x]) as recorder, region("dense"):
        torch.where(x > 0, x, 0.0), x.masked_fill(x > 0, 1.0), x[torch.zeros(2, dtype=torch.int64, device="meta")]
    assert [op.name for op in recorder.ops if op.kind == "pointwise"] == [
        "aten::gt", "aten::where", "aten::gt", "aten::masked_fill",
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_host_read_through_the_one_door_is_recorded(device):
    """`read_ints` is one Op of kind host-read with the bytes that cross, and returns the value or the answer."""
    counts = torch.full((4,), 3, dtype=torch.int64, device=device)
    with Recorder([counts]) as recorder, region("gate"), answering(lambda quantity, values: [3] * values.numel()):
        assert read_ints(counts, "expert_counts") == [3, 3, 3, 3]
    (op,) = recorder.ops
    assert (op.name, op.kind, op.region, op.bytes_read) == ("host::expert_counts", "host-read", "gate", 32)
    assert op.shapes == ((4,),)


@pytest.mark.parametrize("make", [lambda x: torch.zeros(3), lambda x: torch.randn(3, device="cpu") + 1])
def test_tensor_on_another_device_is_refused(make):
    """A traced program stays on one device; a forgotten `device=` is an error, not a free operator."""
    x = torch.zeros(3, device="meta")
    with Recorder([x]), region("dense"), pytest.raises(TraceError, match="device of the input"):
        make(x)
