"""A step with stored experts under the recorder: real or only described, it is the same program, and has a time."""

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.host import answering
from moebench.kernels.region import region
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.systems.moesys.experts import StoredExperts, create_store
from moebench.systems.moesys.policies import make_policy
from moebench.systems.moesys.storage import HierarchicalStorage
from moebench.systems.moesys.stored_layer import StoredMoELayer, layout_of
from moebench.trace.answers import RoutingAnswers
from moebench.trace.recorder import record_step
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.load_machine import load_topology, with_overrides
from moebench.workloads.routing import imposed_input
from tests.systems.moesys.stores import experts_of

DROPLESS = Conventions(capacity_rule="unlimited")


def work_of(tokens=32, d_model=16, d_ffn=24, experts=6):
    """Two choices a token."""
    return LayerWorkload(GateSpec("topk", 2), 1, tokens, d_model, d_ffn, experts)


def storage_of(work, folder=None, capacity=3, slots=2):
    """Of the layer's experts, with files or only described."""
    layout = layout_of(work)
    experts = experts_of(layout, 1, work.experts) if folder else {}
    store = create_store(folder, layout, experts) if folder else None
    keys = [(0, expert) for expert in range(work.experts)]
    device = "cpu" if folder else "meta"
    return HierarchicalStorage(store, make_policy("lru", capacity), slots, device, layout, keys)


def recorded(work, storage, warm=1):
    """The program of a step after `warm` others: forward, backward, Adam, commit."""
    device = storage.device
    layer = StoredMoELayer(work, described_group(1), DROPLESS, device, torch.float32, StoredExperts(storage))
    x_TD, gate_DE = imposed_input(work, 0)
    with torch.no_grad():
        layer.gate.weight_ED.copy_(gate_DE.t().to(device))
    x_TD = x_TD.to(device).requires_grad_()
    answers = RoutingAnswers(work, 1, DROPLESS)

    def step(x_TD):
        y_TD, aux = layer(x_TD)
        with region("loss"):
            upstream = [torch.ones_like(y_TD), torch.ones_like(aux)]
        torch.autograd.backward([y_TD, aux], upstream)
        layer.stored.step()
        layer.stored.commit(1)

    with answering(lambda quantity, _: list(answers.answer(0, quantity))):
        for _ in range(warm):
            step(x_TD)
        return record_step(step, (x_TD,), layer.parameters()).program()


def shown(program):
    """What two programs must have in common."""
    return [(op.name, op.kind, op.stream, op.region, op.phase, op.bytes, op.waits_on) for op in program.ops]


def test_files_and_a_description_are_the_same_program(tmp_path):
    """Every operator and every transfer, with its bytes and what it waits for, in a step after another."""
    work = work_of()
    storage = storage_of(work, tmp_path / "s")
    real = recorded(work, storage)
    storage.close()
    described = recorded(work, storage_of(work))
    assert shown(real) == shown(described)
    kinds = {op.kind for op in described.ops}
    assert {"storage-read", "storage-write", "to-device", "to-host", "host-update"} <= kinds


def test_bytes_are_those_of_the_states():
    """Records to and from files, parameters to the device, gradients back; Adam passes over seven tensors."""
    work = work_of()
    layout, program = layout_of(work), recorded(work, storage_of(work))
    moved = {op.kind: op.bytes for op in program.ops}
    assert moved["storage-read"] == moved["storage-write"] == layout.record_bytes
    assert moved["to-device"] == moved["to-host"] == layout.device_bytes
    assert moved["host-update"] == 7 * layout.elements * 4
    assert sum(op.kind == "storage-write" for op in program.ops) == work.experts  # each is changed once
    all_there = recorded(work, storage_of(work, capacity=work.experts))
    assert not any(op.kind == "storage-read" for op in all_there.ops)


def times_of(slots, **changes):
    """A replayed step of a layer whose states are read from storage each time, on one node of the described machine."""
    work = work_of(tokens=4096, d_model=1024, d_ffn=4096, experts=8)
    program = recorded(work, storage_of(work, capacity=4, slots=slots))
    where = with_overrides(load_topology("1x1-a100-80-nvme"), changes)
    return replay((program,), where, nominal(where.parameters()))


def test_two_slots_hide_copies_and_a_faster_disk_hides_reads():
    """One slot copies when it is needed; the storage stays the bound until it is fast."""
    fast = {"storage.read.bandwidth": "10 TB/s", "storage.write.bandwidth": "10 TB/s"}
    one, two = (times_of(slots, **fast) for slots in (1, 2))
    assert two.exposed_transfer_s[0] < one.exposed_transfer_s[0]
    slow = times_of(2)
    assert slow.busy_share["storage"][0] > 0.8
    assert slow.step_time_s[0] > two.step_time_s[0]
    for found in (one, two, slow):
        parts = sum(found.region_time_s.values()) + found.host_bound_s
        assert parts[0] == pytest.approx(found.step_time_s[0])
