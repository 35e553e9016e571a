"""The simulated ring: its program is the formula's."""

import pytest

from benchmarks.ring_simulated import Way, pass_s, program_of
from moebench.systems.moesys.decoder import expert_layout
from moebench.systems.moesys.hiding import LayerTimes, layer_s, synchronous_s
from moebench.workloads.load import load_topology
from moebench.workloads.models.decoder import DecoderModel, DecoderShape

MODEL = DecoderModel("share", "Share", 3, DecoderShape(2048, 16, 16, 128, 2048, 2, 1), 512, tied=True)
WHERE = load_topology("1x1-a100-80-nvme")


@pytest.mark.parametrize("tokens", [64, 8192])
def test_a_pass_takes_what_the_formula_says(tokens):
    """Copies far longer than compute, and shorter: the naive way, one slot, two, and a layer that stays."""
    copy_s = expert_layout(MODEL, "bfloat16").layer_bytes / WHERE.parameters()["copy.bandwidth"].value
    none, naive, one, two, kept = (
        float(pass_s(MODEL, way, tokens, WHERE)[0][0]) / MODEL.layers
        for way in (Way("none", 3), Way("synchronous", 1), Way("ring", 1), Way("ring", 2), Way("ring", 2, 1))
    )
    assert (copy_s > 2 * none) == (tokens == 64)
    bounds = [LayerTimes(0.0, none, copy_s), LayerTimes(none, 0.0, copy_s)]  # experts' share of the compute: all, none
    assert naive >= synchronous_s(bounds[0]) * 0.99  # in small passes more: the host waits, then issues what follows
    assert tokens == 64 or naive <= synchronous_s(bounds[0]) * 1.05
    for slots, found in ((1, one), (2, two)):
        most, least = (layer_s(times, MODEL.layers, slots) for times in bounds)
        assert least * 0.97 <= found <= most * 1.05
    assert kept <= two * 1.01


def test_slots_are_what_a_ring_holds():
    """Peak memory falls by the layers that have no slot; copies are every layer's in every pass."""
    layout = expert_layout(MODEL, "bfloat16")
    whole, one = (program_of(MODEL, Way("ring", slots), 64, 3) for slots in (3, 1))
    assert whole.peak_bytes - one.peak_bytes == 2 * layout.layer_bytes
    copied = [sum(op.bytes for op in program.ops if op.kind == "to-device") for program in (whole, one)]
    assert copied == [3 * layout.layer_bytes, (1 + 3 * 3) * layout.layer_bytes]
