"""Live bytes follow the lives of storages, exactly."""

import torch

from moebench.kernels.region import region
from moebench.trace.memory import LiveStorages
from moebench.trace.recorder import Recorder, record_step

KIB = 256  # elements of fp32


def _meta(kib):
    return torch.empty(kib * KIB, device="meta")


def test_storage_counts_from_its_allocation_to_its_last_view():
    """A view keeps its storage alive; the bytes go when the view does."""
    live = LiveStorages()
    x = _meta(4)
    view = x[:1]
    live.allocate(x)
    live.allocate(view)
    assert live.live_bytes == 4096
    del x
    assert live.live_bytes == 4096
    del view
    assert live.live_bytes == 0


def test_peak_is_the_most_that_lived_at_once():
    """a and b together are 5 KiB; c comes after a is gone."""
    x = _meta(1)
    with Recorder([x]) as recorder, region("dense"):
        a = x.repeat(3)
        b = x + 1
        del a
        c = x.repeat(2)
        del b, c
    assert recorder.persistent_bytes == 1024
    assert recorder.peak_bytes == 1024 + 4096


def test_saved_tensors_are_freed_as_the_backward_passes():
    """Each node of the backward holds the gradient that it got and the one that it makes, and drops what it saved."""
    x = torch.empty(KIB, device="meta", requires_grad=True)

    def step(x):
        with region("dense"):
            y = x.exp().exp().exp()
        y.backward(y.detach())

    recorder = record_step(step, (x,))
    # x; three activations, of which the last is also the root gradient; the second node has one gradient and makes one.
    assert recorder.persistent_bytes == 1024
    assert recorder.peak_bytes == (1 + 3 + 2) * 1024


def test_gradients_kept_after_the_step_count():
    """The gradient stays alive on the parameter and adds to the peak of what follows."""
    weight = torch.empty(KIB, device="meta", requires_grad=True)
    with Recorder([weight]) as recorder:
        with region("dense"):
            y = weight * 2
        y.backward(y.detach())
        del y
        with region("optimizer"):
            temporary = weight.detach() * 3
            del temporary
    assert recorder.peak_bytes == 3 * 1024


def test_tensor_that_was_not_seeded_counts_as_persistent():
    """What an operator reads and nobody allocated has lived since before the step."""
    x, constant = _meta(1), _meta(2)
    with Recorder([x]) as recorder, region("dense"):
        x + constant.view(2, KIB)[0]
    assert recorder.persistent_bytes == 3 * 1024
    assert recorder.peak_bytes == 4 * 1024


def test_sum_of_gradients_takes_no_third_buffer():
    """Autograd adds two gradients in place; under a mode it doesn't, and the peak must not show it."""
    x = torch.empty(KIB, device="meta", requires_grad=True)
    with Recorder([x]) as recorder:
        with region("dense"):
            a, b = x * 2, x * 3
        torch.autograd.backward((a, b), (a.detach(), b.detach()))
    assert recorder.peak_bytes == 5 * 1024
