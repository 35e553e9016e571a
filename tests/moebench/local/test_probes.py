import pytest
import torch

from moebench.kernels.cost import Product
from moebench.kernels.region import region
from moebench.local import probes
from moebench.local.probes import MEMORY_KINDS, memory_probes, product_probes
from moebench.trace.recorder import record_step
from moebench.workloads.parameters import MEMORY_KINDS as KINDS_OF_A_HARDWARE_FILE


@pytest.fixture(autouse=True)
def small_pool(monkeypatch):
    monkeypatch.setattr(probes, "POOL_BYTES", 1 << 18)


def recorded(call):
    """What the recorder counts for one call."""
    with region("dense"):
        ops = record_step(call).ops
    return [op for op in ops if op.kind not in ("view", "allocation")]


@pytest.mark.parametrize("size", [4096, 1 << 17])
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_a_probe_states_the_kind_and_bytes_that_the_recorder_counts(kind, size):
    """The calibration measures exactly what the cost model will multiply."""
    for probe in memory_probes(kind, size):
        (op,) = recorded(probe.call)
        assert (op.kind, op.bytes) == (kind, probe.bytes), probe.label
        assert size / 3 <= probe.bytes <= 3 * size


@pytest.mark.parametrize("product", [Product(8, 16, 4), Product(8, 16, 4, batch=3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_probe_states_the_flops_and_bytes_that_the_recorder_counts(product, dtype):
    """Forward and gradient, alone and batched."""
    for probe in product_probes(product, dtype):
        (op,) = recorded(probe.call)
        assert (op.kind, op.flops, op.bytes) == ("product", product.flops, probe.bytes), probe.label
        assert op.products == (product,)


def test_every_memory_kind_of_a_hardware_file_has_a_probe():
    """No curve is left to a guess."""
    assert set(MEMORY_KINDS) == set(KINDS_OF_A_HARDWARE_FILE)


def test_operands_rotate_through_the_whole_pool():
    """A call sees an operand again only after all others, and results outlive as many calls."""
    seen = []
    copies = 5
    rotation = probes._Rotation(seen.append, [(number,) for number in range(copies)], kept=copies)
    for _ in range(2 * copies):
        rotation()
    assert seen == [*range(copies), *range(copies)]
