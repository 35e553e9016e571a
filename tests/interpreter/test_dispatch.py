"""An operator runs the implementation that was asked for, forward and backward, on the device of its tensors."""

from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moebench.kernels import define
from moebench.kernels.implementation import use_implementation
from moebench.kernels.permute import permute
from tests.interpreter.counter import Traffic, hooked

ROWS = torch.tensor([[0, 3], [-1, 1]])


def _launches(run):
    """(what `run` returns, kernels launched meanwhile)."""
    traffic = Traffic()
    with hooked(traffic):
        result = run()
    return result, traffic.launches


def test_triton_runs_where_it_is_asked_for_and_nowhere_else():
    """The default on a CPU is torch's code; both give the same."""
    x = torch.randn(2, 5)
    by_torch, launches = _launches(lambda: permute(x, ROWS, 4))
    assert launches == 0
    with use_implementation("triton"):
        by_triton, launches = _launches(lambda: permute(x, ROWS, 4))
    assert launches > 0
    assert torch.equal(by_torch, by_triton)


def test_a_backward_runs_what_is_asked_for_when_it_runs():
    """Not what was when the forward ran."""
    x = torch.randn(2, 5, requires_grad=True)
    out = permute(x, ROWS, 4)
    with use_implementation("triton"):
        _, launches = _launches(lambda: out.sum().backward())
    assert launches > 0
    assert torch.equal(x.grad, torch.tensor([2.0, 1.0])[:, None].expand(2, 5))


def test_a_launch_happens_on_the_device_of_the_tensors(monkeypatch):
    """Triton launches on the current device: another one is made current first."""
    current = [0]

    @contextmanager
    def device(other):
        before, current[0] = current[0], other.index
        yield
        current[0] = before

    with FakeTensorMode():
        tensors = [torch.empty(1, device=f"cuda:{index}") for index in (0, 1)]
    monkeypatch.setattr(define, "chosen", lambda device: "triton")
    monkeypatch.setattr(define, "_launcher", lambda place: lambda tensor: current[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    assert [define._choose(None, "any:launcher", tensor) for tensor in tensors] == [0, 1]
    assert current == [0]
