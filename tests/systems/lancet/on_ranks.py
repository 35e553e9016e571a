"""What ranks run in this folder's tests; apart, so that a rank does not import pytest."""

from dataclasses import replace

import torch

from moebench.kernels.collectives.start_wait import all_to_all
from moebench.kernels.permute import permute
from moebench.systems.lancet.executor import Executor
from moebench.systems.lancet.gating import route_in_parts
from moebench.systems.lancet.irregular import IrregularExchange
from moebench.systems.lancet.training import eager_gradients
from moebench.workloads.layer import GateSpec
from tests.systems.lancet.models import SMALL, data_of, inputs_of, model_of


def largest_differences(group, cases):
    """Of each (shape, plan): how far loss and gradients are from eager mode, relative to the largest of each; 0: equal.

    NaN compares as infinitely far.
    """
    found = []
    for shape, plan in cases:
        model, data = model_of(shape, group), data_of(shape, group.rank)
        loss, gradients = eager_gradients(model, data, group)
        outputs = Executor(plan, group, "cpu")(inputs_of(model, data, 1 / group.size))
        found.append(max(_distance(a, b) for a, b in zip(outputs, (loss, *gradients), strict=True)))
    return found


def _distance(ours, theirs):
    if torch.equal(ours, theirs):
        return 0.0
    far = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    return far if far == far else float("inf")


def irregular_is_regular(group):
    """Buffers by source, and back by destination, are those of the padded all-to-all; rows sent are rows kept."""
    for gate in (GateSpec("switch"), GateSpec("bpr", 1)):
        shape = replace(SMALL, gate=gate, batch_size=8, experts=8)
        for parts in (2, 4, 8):
            torch.manual_seed(group.rank)
            x_TD = torch.randn(shape.tokens, 3)
            logits = torch.randn(shape.tokens, 8) + 0.4 * torch.arange(8)
            routes = list(route_in_parts(logits, shape, parts))
            rows_TK = torch.cat([part.rows_PK for part in routes])
            x_ND = permute(x_TD, rows_TK, shape.experts * shape.capacity)
            exchange = IrregularExchange(group, shape.experts, shape.capacity)
            there, back, sent = torch.zeros_like(x_ND), torch.zeros_like(x_ND), 0
            for part in routes:
                sizes = exchange.sizes(part.ends_E - part.begins_E)
                sent += sum(count for _, count in sizes.sent)
                exchange.dispatch(x_ND, sizes).finish(there)
                exchange.combine(2 * there, sizes).finish(back)
            assert sent == int((rows_TK >= 0).sum()) < shape.tokens
            assert torch.equal(there, all_to_all(x_ND, group))
            assert torch.equal(back, 2 * x_ND)
