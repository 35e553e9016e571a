"""Generation as a part: who computes it, what it holds, what its formula says, and which options can't be."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moebench.cases.case import Case
from moebench.cluster.rows import _traffic
from moebench.kernels.collectives.group import described_group
from moebench.rows.parts import finish
from moebench.sim.replay import replay
from moebench.sim.rows import rows_of_replay
from moebench.systems.moesys.expert_file import ExpertFile, ExpertLayout, aligned_buffer, write_expert_file
from moebench.systems.moesys.part_generation import by_formula, shape_of, small_system
from moebench.systems.part_interface import Setting
from moebench.systems.part_registry import burden, check_options, make, problem
from moebench.trace.part import programs_of
from moebench.trace.recorder import record_step
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_topology
from moebench.workloads.part import workload_of

MODEL = "gpt2-moe+layers=5+d_model=16+heads=2+vocabulary=32+sequence=8"  # three layers of two experts on a rank
SIZES = {"sequences": 2, "prompt": 4, "generated": 3, "top_k": 1, "capacity_percent": 100}
WAYS = ["no-offload", "synchronous", *(f"moesys+slots={slots}" for slots in (1, 2, 3)), "moesys+slots=2+keep=1",
        "moesys+limit_mib=1", "chosen+slots=1", "chosen+slots=5", "chosen+limit_mib=1"]  # fmt: skip
BOTH = ["moesys", "deepspeed", "deepspeed+attention=scores"]


def part(system, name="generation-offloaded", device="cpu", model=MODEL, **sizes):
    """A part on one rank, in float64."""
    workload = workload_of(name, SIZES | sizes, model, dtype="fp32")
    return make(Setting(workload, system, described_group(1), torch.device(device), torch.float64))


@pytest.mark.parametrize("top_k", [1, 2])
def test_every_way_gives_what_the_definition_gives(top_k):
    """The same tokens and logits wherever the experts lie and whoever's layers these are, call after call."""
    calls = [part(way, top_k=top_k) for way in (WAYS if top_k == 1 else WAYS[:4])]
    calls += [part(system, "generation", top_k=top_k) for system in BOTH]
    wanted_BG, wanted_BV = calls[0].run()
    for call in calls:
        for _ in range(2):
            tokens_BG, logits_BV = call.run()
            assert torch.equal(tokens_BG, wanted_BG)
            assert torch.allclose(logits_BV, wanted_BV, rtol=0, atol=1e-6 * float(wanted_BV.abs().max()))
    assert calls[0].wrong((wanted_BG, wanted_BV)) is None


def test_a_wrong_result_is_told():
    """Another token, and logits that are off."""
    call = part("no-offload")
    tokens_BG, logits_BV = call.run()
    other_BG = tokens_BG.clone()
    other_BG[1, 0] = (other_BG[1, 0] + 1) % 32
    assert call.wrong((other_BG, logits_BV)) == "token 0 is not the most probable one"
    assert "logits is off" in call.wrong((tokens_BG, logits_BV * 1.01))


def test_some_tokens_are_dropped_in_what_is_tried():
    """Else nothing would say that a pass of the prompt and those of tokens have slots of their own."""
    few, many = (part("no-offload", capacity_percent=percent).run()[1] for percent in (100, 800))
    assert not torch.allclose(few, many)


def test_memory_is_that_of_the_slots():
    """K layers of N, or so many experts; the rest is the same."""
    def held(system):
        return sum(one.nbytes for one in part(system, device="meta").persistent)

    layout = ExpertLayout(3, 2, 16, 64, "float64", matrices=2)
    whole = held("no-offload")
    weights = 3 * 2 * 2 * 16 * 64 * 8
    for slots in (1, 2, 3):
        assert held(f"moesys+slots={slots}") == whole - weights + slots * layout.layer_bytes
    assert held("synchronous") == held("moesys+slots=1")
    assert sum(one.nbytes for one in part("chosen+slots=5").persistent) == whole - weights + 5 * layout.stride_bytes
    assert burden(workload_of("generation", SIZES, MODEL), "moesys", 1)[0] > 4 * weights / 8


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("moesys+slots=4", "slots = 4: must be between 1 and the layers, 3"),
        ("moesys+limit_mib=0", "a memory limit of 0 bytes is below one layer of experts, 16,384 bytes"),
        ("moesys+slots=2+limit_mib=1", "ring: give either slots or a memory limit"),
        ("moesys+slots=2+keep=2", "keep = 2: must be between 0 and 1"),
        ("chosen+slots=7", "slots = 7: must be between 1 and the experts of all layers, 6"),
        ("chosen+limit_mib=0", "a memory limit of 0 bytes is below one expert, 8,192 bytes"),
    ],
)
def test_options_that_can_not_be_are_refused(system, words):
    """Before anything runs, with what is allowed."""
    with pytest.raises(InputError, match=words):
        check_options(workload_of("generation-offloaded", SIZES, MODEL, dtype="fp32"), system, 1)


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        ({"prompt": 0}, 1, "prompt = 0: must be at least 1"),
        ({"prompt": 7}, 1, "prompt and generated need 9 positions"),
        ({"top_k": 3}, 1, "top_k = 3 must be between 1 and experts = 2"),
        ({"capacity_percent": 10}, 1, "leaves no slot"),
    ],
)
def test_sizes_without_a_meaning_are_told(sizes, ranks, words):
    """With their names."""
    assert words in problem(workload_of("generation", SIZES | sizes, MODEL), "moesys", None, ranks, ranks, 128)


def test_the_model_of_the_ablation_has_its_parameters():
    """58.2 billion and 32 experts, two of each layer on one of 16 ranks."""
    shape = shape_of(workload_of("generation", SIZES, "gpt-58b-moe"), 16)
    assert round(shape.parameters() / 1e9, 1) == 58.2
    assert (shape.experts, len(shape.moe_blocks), shape.dense_width) == (32, 24, 16384)
    assert replace(shape, dense_ffn=0).dense_width == 8192


def test_the_formula_is_that_of_the_ring():
    """The longest of compute, copies and slots; all of both without a ring; compute alone where nothing is copied."""
    workload = workload_of("generation-offloaded", SIZES, MODEL, dtype="fp32")

    def formula(system, *times):
        return by_formula(workload, system, 1, *times)

    assert formula("moesys+slots=2", 9.0, 3.0, 5.0) == pytest.approx(9.0)
    assert formula("moesys+slots=2", 9.0, 3.0, 20.0) == pytest.approx(20.0)
    assert formula("moesys+slots=1", 9.0, 3.0, 8.0) == pytest.approx(11.0)
    assert formula("moesys+slots=3", 9.0, 3.0, 0.0) == formula("moesys+slots=3", 9.0, 3.0, 7.0) == 9.0
    assert formula("synchronous", 9.0, 3.0, 5.0) == pytest.approx(14.0)
    assert formula("moesys+slots=2+keep=1", 9.0, 3.0, 20.0) == pytest.approx(20.0, rel=0.2)
    assert formula("chosen", 9.0, 3.0, 5.0) is formula("no-offload", 9.0, 3.0, 5.0) is None


LARGE = "gpt2-moe+layers=5+d_model=2048+d_ffn=4096+heads=16+vocabulary=512+sequence=1024"
TOPOLOGY = load_topology("1x1-a100-80-nvme")


def simulated(system, sequences, prompt=1, generated=2):
    """Rows of a call on a described GPU by metric, and the program."""
    sizes = {"sequences": sequences, "prompt": prompt, "generated": generated, "top_k": 1, "capacity_percent": 100}
    workload = workload_of("generation-offloaded", sizes, LARGE)
    case = Case("moesys", "ring", system, workload, TOPOLOGY.name, "1x1", "sim")
    (program,) = programs_of(case, TOPOLOGY)
    values = {name: np.array([one.value]) for name, one in TOPOLOGY.parameters().items()}
    rows = rows_of_replay(case, TOPOLOGY, [program], replay([program], TOPOLOGY, values, has_timelines=False))
    return {row.metric: row.value for row in finish(case, TOPOLOGY, rows) if not row.detail}, program


@pytest.mark.parametrize(("sequences", "prompt"), [(8, 1), (16, 1024)])
def test_a_simulated_call_takes_what_the_formula_says(sequences, prompt):
    """Copies far longer than compute, and shorter: one slot, two, a layer that stays, and the naive way."""
    whole, _ = simulated("no-offload", sequences, prompt, 1 if prompt > 1 else 2)
    copies_hide = prompt > 1
    for system in ("moesys+slots=1", "moesys+slots=2", "moesys+slots=2+keep=1", "synchronous"):
        found, program = simulated(system, sequences, prompt, 1 if prompt > 1 else 2)
        tail_s = 2 * 2 * 2 * 2048 * 4096 / 25e9  # a call ends with the copy of the first layer that moves
        least_s = 0.98 * found["formula_time"]
        assert least_s <= found["part_time"] <= 1.03 * found["formula_time"] + tail_s, system
        moved = sum(op.bytes for op in program.ops if op.kind == "to-device")
        layers = 2 if "keep" in system else 3
        assert moved == layers * (1 if prompt > 1 else 2) * 2 * 2 * 2 * 2048 * 4096
        is_near = found["part_time"] - tail_s < 1.05 * whole["part_time"]
        assert is_near == (copies_hide and system != "synchronous"), system


@pytest.mark.parametrize("system", ["synchronous", "moesys+slots=1", "moesys+slots=2", "chosen+slots=1"])
def test_a_call_that_is_recorded_again_waits_for_its_own_copies(system):
    """None of the call before, whose recorder is gone; bytes on links are counted where no disk is described."""
    call = part(system)
    for _ in range(2):
        program = record_step(call.run, persistent=call.persistent).program(0, 1)
        assert any(op.kind == "storage-read" for op in program.ops)
        assert all(place < op.index for op in program.ops for place in op.waits_on)
        assert _traffic([SimpleNamespace(program=program)], load_topology("1x1-a100-40"))["nic"].total_bytes == 0


def test_what_is_tried_for_a_large_ring_is_a_small_one():
    """With as many kinds of slots."""
    assert [small_system(name) for name in ("moesys", "moesys+slots=1", "moesys+slots=23", "chosen+slots=24")] == [
        "moesys", "moesys+slots=1", "moesys+slots=3", "chosen+slots=3",
    ]  # fmt: skip
    assert small_system("moesys+slots=12+keep=10") == "moesys+slots=3+keep=1"
    assert small_system("moesys+limit_mib=800") == "moesys"


def test_experts_without_a_gate_have_two_matrices(tmp_path):
    """In a file, and in what is read from it; a third one is refused."""
    layout = ExpertLayout(2, 3, 8, 4, "float32", matrices=2)
    layers = [(torch.full((3, 8, 4), layer + 1.0), None, torch.full((3, 4, 8), layer + 1.5)) for layer in range(2)]
    write_expert_file(tmp_path / "experts.bin", layout, layers)
    file, buffer = ExpertFile(tmp_path / "experts.bin"), aligned_buffer(layout.layer_bytes)
    for layer, wanted in enumerate(layers):
        file.read(layer, 0, 3, buffer)
        w1, w3, w2 = file.layout.weights(buffer)
        assert (torch.equal(w1, wanted[0]), w3, torch.equal(w2, wanted[2])) == (True, None, True)
    with pytest.raises(ValueError, match="layer 0: 3 matrices"):
        write_expert_file(tmp_path / "other.bin", layout, [(layers[0][0], layers[0][0], layers[0][2])])
    with pytest.raises(InputError, match="matrices = 4: an expert has 3 with a gate, 2 without"):
        replace(layout, matrices=4)
    file.close()
