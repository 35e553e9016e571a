"""What the README shows is true: its example system is right, its files exist."""

import re
from pathlib import Path

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.systems.interface import LayerWeights
from moebench.systems.registry import reference
from moebench.workloads.conventions import COMMON
from moebench.workloads.layer import GateSpec, LayerWorkload

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    """The README's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


@pytest.fixture(scope="module")
def example():
    """The classes of the example system."""
    found = {}
    exec("\n".join(blocks("python")), found)
    return found


@pytest.mark.parametrize("gate", [GateSpec("switch"), GateSpec("gshard", 2), GateSpec("topk", 3)], ids=str)
def test_example_system_equals_the_reference(example, gate):
    """Same outputs, loss and gradients as the loop over experts."""
    workload = LayerWorkload(gate, batch_size=1, sequence=24, d_model=8, d_ffn=12, experts=4)
    group, device, dtype = described_group(1), torch.device("cpu"), torch.float32
    weights = LayerWeights(torch.randn(8, 4), torch.randn(4, 8, 12), torch.randn(4, 12, 8))
    results = []
    for system in (example["Batched"](), reference()):
        assert system.supports(workload, COMMON) is None
        layer = system.build(workload, group, COMMON, device, dtype)
        layer.load_weights(weights)
        x_TD = torch.randn(24, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y_TD, aux = layer(x_TD)
        (y_TD.square().sum() + aux).backward()
        gradients = layer.weight_gradients()
        results.append([y_TD, aux, x_TD.grad, gradients.gate_DE, gradients.w1_LDF, gradients.w2_LFD])
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def test_links_and_pictures_lead_somewhere():
    """Every relative link of the README is a file of the project."""
    targets = [t for t in re.findall(r"\]\(([^)#]+)", README) if not t.startswith("http")]
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []
