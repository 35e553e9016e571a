"""How long Lancet's passes take as a model gets deeper: about linear in the layers for a fixed range."""

from functools import cache

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.systems.lancet.capture import capture
from moebench.systems.lancet.gradient_sync import with_gradient_sync
from moebench.systems.lancet.optimise import optimise
from moebench.systems.lancet.system import sample_data
from moebench.trace.model import MachineProfile
from moebench.workloads.load import load_topology
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.shape import GPT2MoEShape

TOPOLOGY = load_topology("8x8-p4de")
META = torch.device("meta")


@cache
def captured(layers):
    """GPT2-L-MoE on 64 GPUs with another number of layers: its graph and its prices."""
    shape = GPT2MoEShape(layers, 1024, 16, 4096, 2 * TOPOLOGY.ranks, 24)
    group = described_group(TOPOLOGY.ranks, ranks_per_node=TOPOLOGY.gpus_per_node)
    model, data = GPT2MoE(shape, group, META), sample_data(shape, META)
    step = with_gradient_sync(capture(model, data), group)
    return step, MachineProfile(model, data, group, TOPOLOGY, "tf32")


@pytest.mark.parametrize("layers", [6, 12, 24, 48])
def test_passes(benchmark, layers):
    """Prices, ranges, parts, order of the backward; without the capture."""
    step, profile = captured(layers)
    done = benchmark.pedantic(optimise, (step, profile), rounds=1, iterations=1)
    assert done.most_parts > 1
    assert done.after.makespan_s < done.before.makespan_s
