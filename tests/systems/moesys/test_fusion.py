"""Fused buffers: how tensors are put together, and what a step launches; equality is tested on ranks."""

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.region import region
from moebench.systems.moesys.experts import AdamOptions
from moebench.systems.moesys.fusion import ALIGNMENT, GROUP_BYTES, FusedBuffers
from moebench.trace.recorder import record_step

RANKS = described_group(4)


def parameter(*shape, role=None, device="cpu", dtype=torch.float32):
    """Random, with its role marked."""
    tensor = torch.nn.Parameter(torch.empty(*shape, device=device, dtype=dtype).normal_())
    if role is not None:
        setattr(tensor, f"is_{role}", True)
    return tensor


def test_kinds_do_not_mix_and_the_last_tensors_come_first():
    """Gate, expert and other, decayed or not, each dtype: groups of their own."""
    params = [
        parameter(3, 4), parameter(4), parameter(4, 2, role="gate"), parameter(4, 4, role="expert"),
        parameter(3, 5), parameter(2, 2, dtype=torch.bfloat16),
    ]  # fmt: skip
    fused = FusedBuffers(params, {})
    found = [(one.role, one.decays, one.parameters_N.dtype, len(one.params)) for one in fused.groups]
    assert found == [
        ("other", True, torch.bfloat16, 1),
        ("other", True, torch.float32, 2),
        ("expert", True, torch.float32, 1),
        ("gate", True, torch.float32, 1),
        ("other", False, torch.float32, 1),
    ]
    assert [p is q for p, q in zip(fused.groups[1].params, (params[4], params[0]))] == [True, True]


def test_defaults_are_those_of_paddle():
    """256 MiB and 256 bytes."""
    assert (GROUP_BYTES, ALIGNMENT) == (256 * 2**20, 256)


def test_values_move_and_stay():
    """A parameter is a view of its buffer, with the values that it had; gaps are zero, also after steps."""
    params = [parameter(3, 4), parameter(5, 5)]
    values = [p.detach().clone() for p in params]
    fused = FusedBuffers(params, {}, AdamOptions(lr=0.1))
    (group,) = fused.groups
    assert all(torch.equal(p, v) for p, v in zip(params, values))
    assert group.starts == [0, 64]
    assert group.size == 128
    fused.zero_gradients()
    sum((p * p).sum() for p in params).backward()
    fused.finish()
    fused.step()
    assert not any(torch.equal(p, v) for p, v in zip(params, values))
    assert not group.parameters_N[25:64].any()
    assert not group.parameters_N[76:].any()


def test_a_group_is_summed_while_the_backward_runs_and_experts_never():
    """One all-reduce a group of gate and other tensors, the first of them before the last product."""
    device = "meta"
    first, last = parameter(64, 64, device=device), parameter(64, 64, device=device)
    gate, expert = (parameter(64, 64, role=role, device=device) for role in ("gate", "expert"))
    params = [first, gate, expert, last]
    fused = FusedBuffers(params, {"gate": RANKS, "other": RANKS}, group_bytes=64 * 64 * 4)

    def step(x):
        fused.zero_gradients()
        with region("dense"):
            y = x @ first @ gate @ expert @ last
        y.backward(x)
        fused.finish()
        fused.step()

    program = record_step(step, (torch.empty(8, 64, device=device),), params).program()
    sums = [op for op in program.ops if op.collective is not None]
    assert [op.collective.bytes_per_peer for op in sums] == [64 * 64 * 4] * 3
    products = [op.index for op in program.ops if op.kind == "product"]
    assert sums[0].index < products[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"groups": {"router": RANKS}}, "unknown role 'router'; choose one of gate, expert, other"),
        ({"groups": {"expert": RANKS}}, "is not summed"),
        ({"groups": {}, "alignment": 100}, "alignment = 100: a power of two"),
        ({"groups": {}, "group_bytes": 0}, "group_bytes = 0"),
    ],
)
def test_what_has_no_meaning_is_refused(options, said):
    """With what is allowed."""
    with pytest.raises(ValueError, match=said):
        FusedBuffers([parameter(2, 2)], **options)
