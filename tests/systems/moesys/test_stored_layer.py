"""A layer with its experts behind the storage is the plain layer, bit for bit, and moves only what is used."""

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.expert_ffn import expert_ffn
from moebench.kernels.optimizer import AdamW
from moebench.systems.interface import LayerWeights
from moebench.systems.moesys.experts import AdamOptions, StoredExperts, create_store
from moebench.systems.moesys.policies import make_policy
from moebench.systems.moesys.shards import ShardStore
from moebench.systems.moesys.state_layout import StateLayout
from moebench.systems.moesys.storage import HierarchicalStorage
from moebench.systems.moesys.stored_layer import StoredMoELayer, layout_of
from moebench.systems.moesys.visiting import visit
from moebench.systems.registry import get
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload
from tests.systems.moesys.stores import experts_of

CPU = torch.device("cpu")
DROPLESS = Conventions(capacity_rule="unlimited")
OPTIONS = AdamOptions(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
T, D, F, E = 24, 12, 20, 6


def workload(activation="gelu", dtype="fp32", tokens=T):
    """Two choices of six experts."""
    return LayerWorkload(GateSpec("topk", 2), 1, tokens, D, F, E, dtype=dtype, activation=activation)


def weights_of(work):
    """Random ones in the common layout, and a router that never chooses the last expert."""
    experts = experts_of(layout_of(work), 1, E, seed=3)
    stacked = [torch.stack([expert[name] for expert in experts.values()]) for name in layout_of(work).shapes]
    gate_DE = torch.randn(D, E, generator=torch.Generator().manual_seed(4))
    gate_DE[:, -1] = 0
    gate_DE[0, -1] = -1e3
    return LayerWeights(gate_DE, *[part * 0.3 for part in stacked])


def stored_layer(folder, work, policy="lru", capacity=2, slots=1):
    """On a new store whose parameters are not yet those of `weights_of`."""
    layout = layout_of(work)
    store = create_store(folder, layout, experts_of(layout, 1, E))
    storage = HierarchicalStorage(store, make_policy(policy, capacity), slots)
    dtype = layout.dtype
    return StoredMoELayer(work, described_group(1), DROPLESS, CPU, dtype, StoredExperts(storage, OPTIONS))


def tokens_of(work, step):
    """Tokens, whose first column is positive, and what comes from above."""
    generator = torch.Generator().manual_seed(step)
    x_TD = torch.randn(work.tokens, D, generator=generator)
    x_TD[:, 0] = x_TD[:, 0].abs() + 1
    dtype = layout_of(work).dtype
    return x_TD.to(dtype).requires_grad_(), torch.randn(work.tokens, D, generator=generator).to(dtype)


def forward_backward(layer, work, step):
    """Output, loss and gradient of the input."""
    x_TD, upstream_TD = tokens_of(work, step)
    for parameter in layer.parameters():
        parameter.grad = None
    y_TD, aux = layer(x_TD)
    torch.autograd.backward([y_TD, aux], [upstream_TD, torch.ones_like(aux)])
    return y_TD, aux, x_TD.grad


@pytest.mark.parametrize(
    ("activation", "policy", "capacity", "slots"),
    [("gelu", "lru", 1, 1), ("swiglu", "moesys", 2, 2), ("relu", "lfu", 6, 3)],
)
def test_training_equals_the_plain_layer_bit_for_bit(tmp_path, activation, policy, capacity, slots):
    """Outputs, losses, gradients, parameters, moments and steps after six steps of Adam; then from the files again.

    The last expert gets no rows: the plain one then has no gradient, and stays as it is.
    """
    work = workload(activation)
    plain = get("fastmoe").build(work, described_group(1), DROPLESS, CPU, torch.float32)
    layer = stored_layer(tmp_path / "s", work, policy, capacity, slots)
    for one in (plain, layer):
        one.load_weights(weights_of(work))
    adams = [AdamW(e.parameters(), OPTIONS.lr, OPTIONS.betas, weight_decay=OPTIONS.weight_decay) for e in plain.experts]
    for step in range(6):
        expected = forward_backward(plain, work, step)
        found = forward_backward(layer, work, step)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        assert torch.equal(layer.gate.weight_ED.grad, plain.gate.weight_ED.grad)
        for a, b in zip(vars(layer.weight_gradients()).values(), vars(plain.weight_gradients()).values()):
            assert a is b or torch.equal(a, b)
        for key, adam in zip(layer.keys, adams):
            if key in layer.chosen:
                adam.step()
        layer.stored.step()
        with torch.no_grad():
            for one in (plain, layer):
                one.gate.weight_ED -= 0.01 * one.gate.weight_ED.grad
        layer.stored.commit(step + 1)
    assert layer.chosen == layer.keys[:-1]
    check_states(layer.stored, layer.keys, plain, adams)
    layer.stored.storage.close()
    store = ShardStore.open(tmp_path / "s", layout_of(work))
    assert store.step == 6
    storage = HierarchicalStorage(store, make_policy("lru", 1), 1)
    check_states(StoredExperts(storage), layer.keys, plain, adams)
    storage.close()


def check_states(stored, keys, plain, adams):
    """Parameters, moments and steps are those of the plain experts."""
    for key, expert, adam in zip(keys, plain.experts, adams):
        found = stored.parameters(key)
        assert all(torch.equal(found[name], getattr(expert, name)) for name in found)
        averages, squares, steps = stored.moments(key)
        pairs = zip([*averages, *squares], [*adam.averages, *adam.squares])
        order = [name for name, _ in expert.named_parameters()]
        assert order == list(stored.layout.shapes)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert steps == (6 if key != keys[-1] else 0) == adam.steps[0]


def test_training_goes_on_after_a_crash_as_if_there_had_been_none(tmp_path):
    """Three steps are committed, a fourth is not; another process repeats it from the files and goes on."""
    work, committed = workload(), {}
    finals = []
    for crashes in (False, True):
        layer = stored_layer(tmp_path / str(crashes), work, "moesys", 2, 2)
        layer.load_weights(weights_of(work))
        for step in range(6):
            if crashes and step == 4:
                layer.stored.storage.close()  # what step 3 changed since its commit is lost
                store = ShardStore.open(tmp_path / str(crashes), layout_of(work))
                assert store.step == 3
                layer.stored = StoredExperts(HierarchicalStorage(store, make_policy("lru", 1), 1), OPTIONS)
                layer.gate.weight_ED.data.copy_(committed["gate"])
                train(layer, work, 3)
            train(layer, work, step)
            if step < 3:
                layer.stored.commit(step + 1)
                committed["gate"] = layer.gate.weight_ED.detach().clone()
        finals.append([layer.stored.storage.read(key) for key in layer.keys] + [layer.gate.weight_ED.detach()])
        layer.stored.storage.close()
    assert all(torch.equal(a, b) for a, b in zip(*finals))


def train(layer, work, step):
    """One step of experts and router."""
    forward_backward(layer, work, step)
    layer.stored.step()
    with torch.no_grad():
        layer.gate.weight_ED -= 0.01 * layer.gate.weight_ED.grad


def test_an_expert_without_rows_is_never_read(tmp_path):
    """Of six states five move."""
    work = workload()
    layer = stored_layer(tmp_path / "s", work, capacity=6, slots=2)
    layer.gate.weight_ED.data.copy_(weights_of(work).gate_DE.t())
    forward_backward(layer, work, 0)
    layer.stored.step()
    assert layer.stored.storage.counts.reads == E - 1
    assert (0, E - 1) not in layer.stored.storage.cache
    layer.stored.storage.close()


def test_while_an_expert_works_the_next_one_comes(tmp_path):
    """With two slots every use finds its parameters on the device or on the way, forward and backward."""
    work = workload()
    layer = stored_layer(tmp_path / "s", work, capacity=2, slots=2)
    forward_backward(layer, work, 0)
    counts = layer.stored.storage.counts
    assert counts.uses == counts.slot_hits == 2 * len(layer.chosen)
    layer.stored.storage.close()


def test_masters_in_fp32_under_bf16(tmp_path):
    """The device computes in BF16; parameters and moments are FP32, as if kept beside the layer."""
    work = workload(dtype="bf16")
    layer = stored_layer(tmp_path / "s", work, capacity=3, slots=2)
    weights = weights_of(work)
    layer.load_weights(weights)
    masters = [weights.w1_LDF.clone(), weights.w2_LFD.clone()]
    plain = get("fastmoe").build(work, described_group(1), DROPLESS, CPU, torch.bfloat16)
    adam = AdamW(masters, OPTIONS.lr, OPTIONS.betas, weight_decay=OPTIONS.weight_decay)
    for step in range(3):
        plain.load_weights(LayerWeights(weights.gate_DE, *masters))
        expected, found = forward_backward(plain, work, step), forward_backward(layer, work, step)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        gradients = plain.weight_gradients()
        for master, gradient in zip(masters, (gradients.w1_LDF, gradients.w2_LFD)):
            master.grad = gradient.float()
        before = [master.clone() for master in masters]
        adam.step()
        layer.stored.step()
        for master, old in zip(masters, before):
            master.data[-1] = old[-1]  # no rows
    for key in layer.keys:
        for found, master in zip(layer.stored.parameters(key).values(), masters):
            assert torch.equal(found, master[key[1]])
    layer.stored.storage.close()


def test_zero_tokens_and_evaluation(tmp_path):
    """No rows: nothing is read. Without gradients nothing is kept."""
    layer = stored_layer(tmp_path / "s", workload(tokens=0))
    y_TD, _, _ = forward_backward(layer, workload(tokens=0), 0)
    assert y_TD.shape == (0, D)
    assert layer.stored.storage.counts.requests == 0
    layer.stored.storage.close()
    work = workload()
    layer = stored_layer(tmp_path / "t", work)
    with torch.no_grad():
        quiet, _ = layer(tokens_of(work, 0)[0])
    loud, _, _ = forward_backward(layer, work, 0)
    assert torch.equal(quiet, loud)
    assert layer.stored.gradient_bytes == len(layer.chosen) * layer.stored.layout.device_bytes
    layer.stored.forget_gradients()
    layer.stored.storage.close()


def test_gradients_of_several_visits_add_up(tmp_path):
    """Two micro-batches before one step."""
    layout = StateLayout({"w1_DF": (D, F), "w2_FD": (F, D)})
    experts = experts_of(layout, 1, 2)
    storage = HierarchicalStorage(create_store(tmp_path / "s", layout, experts), make_policy("lru", 1), 1)
    stored = StoredExperts(storage)
    leaves = [weight.clone().requires_grad_() for weight in experts[0, 0].values()]
    for seed in range(2):
        x_ND = torch.randn(4, D, generator=torch.Generator().manual_seed(seed))
        visit(stored, (0, 0), lambda x, a, b: expert_ffn(x, a, b, None, "gelu"), x_ND).sum().backward()
        expert_ffn(x_ND, *leaves, None, "gelu").sum().backward()
    assert all(torch.equal(a, leaf.grad) for a, leaf in zip(stored.gradients((0, 0)), leaves))
    assert all(not gradient.any() for gradient in stored.gradients((0, 1)))
    storage.close()
