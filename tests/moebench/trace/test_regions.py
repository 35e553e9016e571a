"""Backward operators inherit the region of the forward operator that they differentiate."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moebench.kernels.region import region
from moebench.trace.errors import UnattributedOperator
from moebench.trace.recorder import Recorder


def _leaf(*shape, device="meta"):
    return torch.zeros(*shape, device=device, requires_grad=True)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_backward_operator_takes_the_region_of_its_forward(device):
    """Two products in two regions: each product's two backward products lie in its region, in reverse order."""
    x, w, v = _leaf(4, 8, device=device), _leaf(8, 8, device=device), _leaf(8, 8, device=device)
    with Recorder([x, w, v]) as recorder:
        with region("gate"):
            h = x @ w
        with region("experts"):
            y = h @ v
        y.backward(torch.ones_like(y.detach(), device=device) if device == "none" else y.detach())
    products = [(op.region, op.phase) for op in recorder.ops if op.kind == "product"]
    assert products == [
        ("gate", "forward"),
        ("experts", "forward"),
        ("experts", "backward"),
        ("experts", "backward"),
        ("gate", "backward"),
        ("gate", "backward"),
    ]


def test_sum_of_gradients_belongs_to_the_branch_that_came_last():
    """A tensor used in two regions has its gradients added; the addition has a region, and is in place."""
    x = _leaf(4, 8)
    with Recorder([x]) as recorder:
        with region("gate"):
            a = x * 2
        with region("dispatch"):
            b = x * 3
        torch.autograd.backward((a, b), (a.detach(), b.detach()))
    (addition,) = [op for op in recorder.ops if op.name.startswith("aten::add")]
    assert (addition.name, addition.region, addition.phase) == ("aten::add_", "gate", "backward")


def test_root_gradient_belongs_to_the_loss():
    """`loss.backward()` makes ones; they count as the loss's, in the backward."""
    x = _leaf(4)
    with Recorder([x]) as recorder:
        with region("loss"):
            loss = x.sum()
        loss.backward()
    (ones,) = [op for op in recorder.ops if op.name == "aten::ones_like"]
    assert (ones.region, ones.phase) == ("loss", "backward")


def test_gradient_accumulation_belongs_to_the_gradient_synchronisation():
    """Adding to an existing gradient happens in autograd's accumulation node."""
    x = _leaf(4)
    x.grad = torch.zeros(4, device="meta")
    with Recorder([x]) as recorder:
        with region("experts"):
            y = x * 2
        y.backward(y.detach())
    assert [op.region for op in recorder.ops if op.name.startswith("aten::add")] == ["grad-sync"]


def test_hook_keeps_the_region_that_it_opens():
    """A gradient hook that opens a region is attributed to it, not to the node that called it."""
    x = _leaf(4)

    def hook(parameter):
        with region("optimizer"):
            parameter.detach().add_(parameter.grad)

    x.register_post_accumulate_grad_hook(hook)
    with Recorder([x]) as recorder:
        with region("experts"):
            y = x * 2
        y.backward(y.detach())
    assert recorder.ops[-1].region == "optimizer"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_takes_the_region_that_it_opens(use_reentrant):
    """A checkpointed block runs its forward again in the backward, in the regions of its own `with` blocks."""
    x, w, v = _leaf(4, 8), _leaf(8, 8), _leaf(8, 8)

    def block(x):
        with region("gate"):
            h = x @ w
        with region("experts"):
            return (h @ v).relu()

    with Recorder([x, w, v]) as recorder:
        y = checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        y.backward(y.detach())
    again = [op for op in recorder.ops if op.phase == "backward" and op.kind == "product"]
    assert [op.region for op in again] == ["gate", "experts", "experts", "experts", "gate", "gate"]


def test_autograd_function_gives_its_region_to_its_backward():
    """Operators inside a custom Function's backward lie where the Function was called."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 + 0

    x = _leaf(4)
    with Recorder([x]) as recorder:
        with region("combine"):
            y = Double.apply(x)
        with region("loss"):
            z = y * 3
        z.backward(z.detach())
    assert [op.region for op in recorder.ops if op.phase == "backward"] == ["loss", "combine", "combine"]


def test_optimizer_region_is_a_phase():
    """What runs in the region `optimizer` is the optimiser phase."""
    x = torch.zeros(4, device="meta")
    with Recorder([x]) as recorder, region("optimizer"):
        x.add_(1)
    assert recorder.ops[0].phase == "optimizer"


def test_operator_outside_every_region_is_an_error_that_names_the_line():
    """Nothing is unattributed; the error says which operator and where."""
    x = torch.zeros(4, device="meta")
    with Recorder([x]), pytest.raises(UnattributedOperator, match=r"aten::mul .*region.*test_regions.py"):
        x * 2


def test_backward_of_a_forward_that_was_not_recorded_is_an_error():
    """A graph built before the recording has no regions."""
    x = _leaf(4)
    y = x * 2
    with Recorder([x]), pytest.raises(UnattributedOperator, match="forward was not recorded"):
        y.backward(y.detach())


def test_what_a_backward_recomputes_has_the_regions_that_it_opens():
    """Also inside an autograd Function, where gradients are off: its own backward is of the same region."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            x = _leaf(4)
            with torch.enable_grad():
                with region("experts"):
                    h = x * 3
                with region("exchange"):
                    y = Doubled.apply(h)
            torch.autograd.backward(y, gradient)
            return x.grad

    x = _leaf(4)
    with Recorder([x]) as recorder:
        with region("dense"):
            y = Again.apply(x)
        torch.autograd.backward(y, y.detach())
    found = [(op.region, op.phase) for op in recorder.ops if op.name.startswith("aten::mul")]
    assert found == [(where, "backward") for where in ("experts", "exchange", "exchange", "experts")]
