"""Gates in parts decide as gates of the whole batch; the irregular exchange moves what the padded one does."""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.permute import permute
from moebench.systems.lancet import irregular
from moebench.systems.lancet.gating import naive_kept, partition_problem, route_in_parts
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec
from moebench.workloads.models.moe import routes_of
from moebench.workloads.models.shape import MODEL_CONVENTIONS
from tests.systems.lancet.models import SMALL

WIDE = replace(SMALL, batch_size=8, experts=6)
TOKEN_MAJOR = replace(MODEL_CONVENTIONS, choice_order="token-major")
SHAPES = {
    "switch": WIDE,
    "bpr": replace(WIDE, gate=GateSpec("bpr", 1)),
    "top-2": replace(WIDE, gate=GateSpec("topk", 2), conventions=TOKEN_MAJOR),
    "bpr-2": replace(WIDE, gate=GateSpec("bpr", 2), conventions=TOKEN_MAJOR),
    "tight": replace(WIDE, capacity_factor=0.3),
}


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parts_decide_as_the_whole(shape, parts):
    """Experts, slots, drops and weights bit for bit, with uneven logits; each part's slots are a run of its own."""
    for seed in range(5):
        torch.manual_seed(seed)
        logits = 2 * torch.randn(shape.tokens, shape.experts) + torch.arange(shape.experts) * 0.7
        whole = routes_of(logits, shape)
        found = list(route_in_parts(logits, shape, parts))
        assert torch.equal(torch.cat([part.experts_PK for part in found]), whole.experts_TK)
        assert torch.equal(torch.cat([part.rows_PK for part in found]), whole.rows_TK)
        assert torch.equal(torch.cat([part.weights_PK for part in found]), whole.weights_TK)
        assert (whole.rows_TK < 0).any()
        for part in found:
            wanted = [
                expert * shape.capacity + slot
                for expert, (begin, end) in enumerate(zip(part.begins_E.tolist(), part.ends_E.tolist()))
                for slot in range(begin, end)
            ]
            assert sorted(row for row in part.rows_PK.flatten().tolist() if row >= 0) == wanted


def test_naive_parts_drop_what_the_whole_keeps():
    """The paper's case: 3/4 C tokens of an expert in the first half, 1/4 C in the second; C / 4 are lost, here none."""
    shape = replace(SMALL, batch_size=2, sequence=16, experts=2, capacity_factor=1.0)
    capacity = shape.capacity
    assert capacity == 16
    wants_first = [True] * 12 + [False] * 4 + [True] * 4 + [False] * 12
    experts = torch.tensor([0 if first else 1 for first in wants_first]).view(-1, 1)
    logits = torch.eye(2)[experts.view(-1)]
    kept = naive_kept(experts, shape, 2)
    lost = int((~kept[:, 0] & (experts[:, 0] == 0)).sum())
    assert lost == capacity // 4
    assert all((part.rows_PK >= 0).all() for part in route_in_parts(logits, shape, 2))
    for parts in (2, 4, 8):
        torch.manual_seed(parts)
        logits = torch.randn(WIDE.tokens, WIDE.experts)
        whole = routes_of(logits, WIDE)
        assert int(naive_kept(whole.experts_TK, WIDE, parts).sum()) < int((whole.rows_TK >= 0).sum())


@pytest.mark.parametrize(
    ("shape", "parts", "before_gate", "says"),
    [
        (WIDE, 3, True, "do not divide the batch"),
        (WIDE, 0, True, "do not divide"),
        (SHAPES["bpr"], 2, True, "needs the whole batch"),
        (replace(WIDE, gate=GateSpec("topk", 2)), 2, True, "every first choice"),
    ],
)
def test_gates_that_have_no_parts_say_why(shape, parts, before_gate, says):
    """One sentence; and none where there are parts."""
    assert says in partition_problem(shape, parts, before_gate)
    assert partition_problem(WIDE, 2, True) is None
    assert partition_problem(SHAPES["bpr"], 2, before_gate=False) is None
    if parts == 3:
        with pytest.raises(InputError, match=says):
            list(route_in_parts(torch.randn(shape.tokens, shape.experts), shape, parts))


def test_packed_rows_come_back_and_fill_the_buffers():
    """Alone: sent, computed by expert and sent back in parts, the buffers are those of the whole batch."""
    key = described_group(1).key
    for gate in (GateSpec("switch"), GateSpec("bpr", 1)):
        shape = replace(WIDE, gate=gate)
        torch.manual_seed(3)
        x_TD = torch.randn(shape.tokens, 3)
        logits = torch.randn(shape.tokens, shape.experts) + 0.4 * torch.arange(shape.experts)
        routes = list(route_in_parts(logits, shape, 4))
        rows_TK = torch.cat([part.rows_PK for part in routes])
        x_ND = permute(x_TD, rows_TK, shape.experts * shape.capacity)
        sizes, there, back = [], [], []
        for number, (part, x_PD) in enumerate(zip(routes, x_TD.chunk(4))):
            packed_PK, counts_E = irregular.part_layout(part.rows_PK, shape.experts, shape.capacity)
            assert torch.equal(counts_E, part.ends_E - part.begins_E)
            started = irregular.start_sizes(counts_E, key)
            sizes.append(irregular.read_sizes(started, counts_E, shape.capacity, number, 4, key))
            sent = permute(x_PD, packed_PK, packed_PK.numel())
            there.append(irregular.by_expert(irregular.launch_dispatch(sent, sizes[-1], key).wait(), sizes[-1]))
            returned = irregular.launch_combine(irregular.by_source(2 * there[-1], sizes[-1]), sizes[-1], key)
            back.append(irregular.wait_part(returned))
            kept = packed_PK >= 0
            assert torch.equal(back[-1].index_select(0, packed_PK[kept]), 2 * x_PD[kept[:, 0]])
        blocks = range(shape.experts)
        for parts, factor in ((there, 1), (back, 2)):
            whole = irregular.merged(parts, sizes, blocks, shape.capacity, x_ND.shape)
            assert torch.equal(whole, factor * x_ND)
        with pytest.raises(ValueError, match="than its 1 slots"):
            irregular.merged(there, sizes, blocks, 1, x_ND.shape)
