"""2D prefetch on the described machine: two links work at once, beside the compute stream."""

from functools import partial

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.host import answering
from moebench.kernels.region import region
from moebench.program import COMMUNICATION
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.systems.moesys.experts import StoredExperts
from moebench.systems.moesys.policies import make_policy
from moebench.systems.moesys.prefetched_model import AHEAD, PrefetchedModel
from moebench.systems.moesys.sliced import SlicedLayers
from moebench.systems.moesys.storage import HierarchicalStorage
from moebench.systems.moesys.stored_layer import StoredMoELayer, layout_of
from moebench.trace.answers import RoutingAnswers
from moebench.trace.recorder import record_step
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from moebench.workloads.load_machine import load_topology, with_overrides

META = torch.device("meta")
DROPLESS = Conventions(capacity_rule="unlimited")
RANKS, BLOCKS = 8, 4
WORK = LayerWorkload(GateSpec("topk", 2), 1, 2048, 1024, 4096, 16, routing=RoutingSpec("exact"))


def dense(x_TD, w1, w2):
    """Two products."""
    return torch.relu(x_TD @ w1) @ w2


def recorded(ahead, capacity=BLOCKS * 2, slots=3):
    """A step after another, of a rank among eight, each with two experts of each block."""
    group, layout = described_group(RANKS), layout_of(WORK)
    keys = [(place, expert) for place in range(BLOCKS) for expert in range(2)]
    storage = HierarchicalStorage(None, make_policy("lru", capacity), slots, META, layout, keys)
    stored = StoredExperts(storage)
    moe = [StoredMoELayer(WORK, group, DROPLESS, META, torch.float32, stored, place) for place in range(BLOCKS)]
    weights = [torch.empty(1024, 4096, device=META), torch.empty(4096, 1024, device=META)]
    sliced = SlicedLayers([dict(zip(("w1", "w2"), weights))] * BLOCKS, group)
    model = PrefetchedModel(sliced, dense, moe, ahead)
    x_TD = torch.empty(WORK.tokens, WORK.d_model, device=META, requires_grad=True)
    answers = RoutingAnswers(WORK, RANKS, DROPLESS)

    def step(x_TD):
        y_TD, aux = model(x_TD)
        with region("loss"):
            upstream = [torch.ones_like(y_TD), torch.ones_like(aux)]
        torch.autograd.backward([y_TD, aux], upstream)
        model.step()

    with answering(lambda quantity, _: list(answers.answer(0, quantity))):
        step(x_TD)
        return record_step(step, (x_TD,), [*model.parameters(), *sliced.slices]).program(0, RANKS, range(RANKS))


def replayed(program, **changes):
    """On one node; storage is no bound unless asked for."""
    where = with_overrides(load_topology("1x8-a100-80-nvme"), changes)
    return replay((program,), where, nominal(where.parameters()))


@pytest.fixture(scope="module")
def programs():
    """By what comes before it is needed."""
    return {ahead: recorded(ahead) for ahead in AHEAD}


def test_the_same_work_either_way(programs):
    """Prefetch moves nothing that would not be moved, and computes the same."""
    def work(program, kinds):
        return sorted((op.kind, op.bytes, op.flops) for op in program.ops if op.kind in kinds)

    for kinds in (("product", "pointwise"), ("collective",), ("to-host",), ("host-update",)):
        assert len({str(work(program, kinds)) for program in programs.values()}) == 1
    copies = {ahead: len(work(program, ("to-device",))) for ahead, program in programs.items()}
    assert copies["2d"] <= copies["none"]


def waits(program):
    """For transfers of experts, and for gathers of slices."""
    found = replayed(program)
    gathers = [found.exposed_time_s.get(("dense", phase), [0])[0] for phase in ("forward", "backward")]
    return found.exposed_transfer_s[0], sum(gathers), found.step_time_s[0]


def test_each_direction_hides_its_own_link(programs):
    """Slices ahead hide gathers, experts ahead hide copies; both together take least time."""
    found = {ahead: waits(program) for ahead, program in programs.items()}
    assert found["horizontal"][1] < found["none"][1]
    assert found["vertical"][0] < found["none"][0]
    assert found["2d"][0] < found["horizontal"][0]
    assert found["2d"][1] < found["vertical"][1]
    times = {ahead: step_s for ahead, (_, _, step_s) in found.items()}
    assert times["2d"] < min(times["horizontal"], times["vertical"])
    assert times["none"] > max(times["horizontal"], times["vertical"])


def test_both_links_work_at_once(programs):
    """More gathers of slices run while experts are copied than without prefetch."""
    overlaps = {}
    for ahead in ("none", "2d"):
        program = programs[ahead]
        line = replayed(program).timelines[0]
        spans = partial(zip, line.start_s, line.end_s)
        gathers = [s for s, op in zip(spans(), program.ops) if op.stream == COMMUNICATION and "all_gather" in op.name]
        copies = [s for s, op in zip(spans(), program.ops) if op.kind == "to-device"]
        overlaps[ahead] = sum(a < d and c < b for a, b in gathers for c, d in copies)
    assert overlaps["2d"] > overlaps["none"]


def test_a_block_has_one_part_of_each():
    """Other numbers are refused."""
    stored = StoredExperts(HierarchicalStorage(None, make_policy("lru", 1), 1, META, layout_of(WORK), [(0, 0)]))
    layer = StoredMoELayer(WORK, described_group(RANKS), DROPLESS, META, torch.float32, stored)
    sliced = SlicedLayers([{"w": torch.zeros(2)}] * 2, described_group(1))
    with pytest.raises(ValueError, match="2 dense layers and 1 MoE layers"):
        PrefetchedModel(sliced, dense, [layer])
    with pytest.raises(ValueError, match="prefetch 'both'; choose one of none, horizontal, vertical, 2d"):
        PrefetchedModel(sliced, dense, [layer] * 2, "both")
    with pytest.raises(ValueError, match="at least one layer"):
        SlicedLayers([], described_group(1))
    with pytest.raises(ValueError, match="one dtype"):
        SlicedLayers([{"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float64)}], described_group(1))
