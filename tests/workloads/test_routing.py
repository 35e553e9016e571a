"""The logits that a workload imposes on every system."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates import steps
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from moebench.workloads.routing import imposed_input, logits_for

WORKLOAD = LayerWorkload(GateSpec("topk", 2), batch_size=2, sequence=32, d_model=24, d_ffn=8, experts=16)


def routed(workload, rank):
    gate = workload.gate
    return get_gate(gate.name).route(logits_for(workload, rank), gate, COMMON, workload.capacity_factor)


def test_one_seed_and_rank_give_one_routing():
    """Logits depend on seed and rank only, and differ between ranks and seeds."""
    a, b = logits_for(WORKLOAD, 0), logits_for(WORKLOAD, 0)
    assert torch.equal(a, b)
    assert a.shape == (64, 16)
    assert a.dtype == torch.float32
    assert not torch.equal(a, logits_for(WORKLOAD, 1))
    assert not torch.equal(a, logits_for(replace(WORKLOAD, routing=RoutingSpec(seed=1)), 0))


def test_independent_logits_drop_tokens():
    """Under iid routing some tokens are dropped at capacity factor 1, and experts are about equally popular."""
    workload = replace(WORKLOAD, sequence=2048)
    counts = routed(workload, 0).counts_E
    assert ((counts / counts.sum() - 1 / 16).abs() < 0.01).all()
    assert routed(workload, 0).dropped > 0


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_exact_routing_is_exact(top_k):
    """T/E tokens an expert and choice, nothing dropped, loss 1; with a remainder, the ranks together even it out."""
    workload = replace(WORKLOAD, gate=GateSpec("topk", top_k), routing=RoutingSpec("exact"))
    routing = routed(workload, 1)
    assert routing.counts_E.tolist() == [64 // 16 * top_k] * 16
    assert routing.dropped == 0
    torch.testing.assert_close(routing.aux, torch.tensor(1.0))
    odd = replace(workload, sequence=6, gate=GateSpec("switch", 1))
    total = sum(routed(odd, rank).counts_E for rank in range(4))
    assert total.tolist() == [12 * 4 // 16] * 16


def test_zipf_popularity():
    """The r-th most popular expert gets a share proportional to 1/r^alpha, the same expert on every rank."""
    workload = replace(WORKLOAD, sequence=20000, gate=GateSpec("switch", 1), routing=RoutingSpec("zipf", alpha=1.0))
    first, second = routed(workload, 0).counts_E, routed(workload, 1).counts_E
    assert first.argmax() == second.argmax()
    share = first.sort(descending=True).values / first.sum()
    harmonic = 1 / torch.arange(1, 17)
    torch.testing.assert_close(share, harmonic / harmonic.sum(), atol=0.01, rtol=0)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_the_imposed_input_carries_the_logits_exactly(dtype):
    """A linear gate on the imposed input, cast to the workload's dtype, sees the workload's logits bit for bit."""
    workload = replace(WORKLOAD, dtype=dtype)
    x_TD, gate_DE = (t.to(steps.torch_dtype(dtype)) for t in imposed_input(workload, 3))
    assert torch.equal(steps.router_logits(x_TD, gate_DE, COMMON), logits_for(workload, 3))
    assert x_TD[:, 16:].float().std() > 0.5


def test_no_room_for_the_logits_is_an_error():
    """D below E can't carry the logits."""
    with pytest.raises(InputError, match="d_model = 8 is below experts = 16"):
        imposed_input(replace(WORKLOAD, d_model=8), 0)


def test_a_recorded_routing(tmp_path):
    """Rank r takes rows r T to (r + 1) T of the file; what does not fit is an error that names file and numbers."""
    rows = np.random.default_rng(0).normal(size=(130, 16)).astype(np.float32)
    path = str(tmp_path / "routing.npz")
    np.savez(path, logits=rows)
    workload = replace(WORKLOAD, routing=RoutingSpec("trace", path=path))
    np.testing.assert_array_equal(logits_for(workload, 1).numpy(), rows[64:128])
    with pytest.raises(InputError, match="holds 130 tokens, rank 2 needs rows 128 to 192"):
        logits_for(workload, 2)
    with pytest.raises(InputError, match="experts = 8"):
        logits_for(replace(workload, experts=8), 0)


@pytest.mark.parametrize(("content", "word"), [(None, "no such file"), (b"text", "not a NumPy .npz"), ({}, "no array")])
def test_a_bad_recording_is_an_error(tmp_path, content, word):
    """A missing, broken or wrong file is named."""
    path = tmp_path / "bad.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, other=np.zeros(2))
    with pytest.raises(InputError, match=word):
        logits_for(replace(WORKLOAD, routing=RoutingSpec("trace", path=str(path))), 0)
    with pytest.raises(InputError, match="needs the path"):
        logits_for(replace(WORKLOAD, routing=RoutingSpec("trace")), 0)


def test_a_recording_with_an_infinite_logit_is_an_error(tmp_path):
    """Softmax of an infinite logit has no meaning."""
    np.savez(tmp_path / "r.npz", logits=np.full((64, 16), np.inf))
    with pytest.raises(InputError, match="not all finite"):
        logits_for(replace(WORKLOAD, routing=RoutingSpec("trace", path=str(tmp_path / "r.npz"))), 0)


def test_an_unknown_routing_lists_the_valid_ones():
    """A wrong kind is refused."""
    with pytest.raises(InputError, match="exact, iid, trace, zipf"):
        logits_for(replace(WORKLOAD, routing=RoutingSpec("even")), 0)
