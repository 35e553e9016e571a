"""Checks of fused buffers, slices and 2D prefetch on real ranks; a check returns what is wrong, in words."""

import tempfile
from pathlib import Path

import torch

from moebench.kernels.collectives.grad_sync import GradientSync
from moebench.kernels.collectives.outstanding import check_finished
from moebench.kernels.optimizer import AdamW
from moebench.systems.moesys.experts import AdamOptions, StoredExperts, create_store
from moebench.systems.moesys.fusion import FusedBuffers
from moebench.systems.moesys.policies import make_policy
from moebench.systems.moesys.prefetched_model import AHEAD, PrefetchedModel
from moebench.systems.moesys.sliced import SlicedLayers
from moebench.systems.moesys.storage import HierarchicalStorage
from moebench.systems.moesys.stored_layer import StoredMoELayer, layout_of
from moebench.systems.moesys.visiting import visit
from moebench.systems.registry import get
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload

CPU, FP64 = torch.device("cpu"), torch.float64
DROPLESS = Conventions(capacity_rule="unlimited", gate_dtype="fp64")
OPTIONS = AdamOptions(lr=1e-2, weight_decay=0.1)
WORK = LayerWorkload(GateSpec("topk", 2), 1, 20, 8, 12, 4, dtype="fp64", activation="gelu")
BLOCKS, STEPS = 3, 3


def random(*shape, seed):
    """The same on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64) * 0.3


def differs(found, expected, ranks):
    """Sums of two ranks are the same in any order; of more to the last bits."""
    if ranks <= 2:
        return not torch.equal(found, expected)
    return not torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


def tokens(group, step):
    """Of this rank, and what comes from above."""
    x_TD = random(WORK.tokens, WORK.d_model, seed=100 * step + group.index)
    return x_TD, random(WORK.tokens, WORK.d_model, seed=7000 + 100 * step + group.index)


def plain_layer(group, place):
    """A layer with seeded weights, its own part of the experts."""
    layer = get("fastmoe").build(WORK, group, DROPLESS, CPU, FP64)
    with torch.no_grad():
        layer.gate.weight_ED.copy_(random(WORK.experts, WORK.d_model, seed=place))
        for expert, number in zip(layer.experts, own_experts(group)):
            for index, parameter in enumerate(expert.parameters()):
                parameter.copy_(random(*parameter.shape, seed=1000 * place + 10 * number + index))
    return layer


def own_experts(group):
    """Numbers of this rank's."""
    local = WORK.experts // group.size
    return range(group.index * local, (group.index + 1) * local)


def dense_of(place):
    """Tensors of a dense part: two products and a bias."""
    d_model = WORK.d_model
    shapes = {"w1": (d_model, 10), "b1": (10,), "w2": (10, d_model)}
    return {name: random(*shape, seed=500 + 10 * place + i) for i, (name, shape) in enumerate(shapes.items())}


def dense(x_TD, w1, b1, w2):
    """What a dense part computes."""
    return torch.tanh(x_TD @ w1 + b1) @ w2


def backward(y_TD, aux, upstream_TD, group):
    """The job's loss is the mean of the ranks'."""
    torch.autograd.backward([y_TD, aux], [upstream_TD, torch.full_like(aux, 1 / group.size)])


def fused_buffers_equal_single_tensors(group):
    """Gradients and parameters after three steps, with groups of one, of some and of all tensors."""
    wrong = []
    expected = trained_apart(group)
    for group_bytes in (1, 1200, 256 * 2**20):
        layer, extra = plain_layer(group, 0), [w.requires_grad_() for w in dense_of(0).values()]
        params = [*layer.parameters(), *extra]
        fused = FusedBuffers(params, {"gate": group, "other": group}, OPTIONS, group_bytes=group_bytes)
        for step in range(STEPS):
            fused.zero_gradients()
            x_TD, upstream_TD = tokens(group, step)
            backward(*layer(x_TD + dense(x_TD, *extra)), upstream_TD, group)
            fused.finish()
            fused.step()
        check_finished()
        pairs = list(zip(params, expected))
        wrong += [f"{group_bytes}: parameter {i}" for i, (a, b) in enumerate(pairs) if differs(a, b[0], group.size)]
        wrong += [f"{group_bytes}: gradient {i}" for i, (a, b) in enumerate(pairs) if differs(a.grad, b[1], group.size)]
        places = [(p.data_ptr() - f.parameters_N.data_ptr()) % 256 for f in fused.groups for p in f.params]
        wrong += [f"{group_bytes}: {places}"] * any(places)
        wrong += [f"{group_bytes}: a group too large"] * any(
            f.nbytes > group_bytes and len(f.params) > 1 for f in fused.groups
        )
    return wrong


def trained_apart(group):
    """Parameters and last gradients without buffers."""
    layer, extra = plain_layer(group, 0), [w.requires_grad_() for w in dense_of(0).values()]
    params = [*layer.parameters(), *extra]
    sync = GradientSync([p for p in params if not getattr(p, "is_expert", False)], group)
    adams = [
        AdamW([p for p in params if (p.dim() > 1) == decays], OPTIONS.lr, weight_decay=OPTIONS.weight_decay * decays)
        for decays in (True, False)
    ]
    for step in range(STEPS):
        for param in params:
            param.grad = None
        x_TD, upstream_TD = tokens(group, step)
        backward(*layer(x_TD + dense(x_TD, *extra)), upstream_TD, group)
        sync.finish()
        for adam in adams:
            adam.step()
    return [(param.detach(), param.grad) for param in params]


def slices_equal_whole_layers(group):
    """Parameters after three steps; a rank keeps its part, and at most two layers are whole at once."""
    wrong, sliced = [], SlicedLayers([dense_of(place) for place in range(BLOCKS)], group, OPTIONS)
    whole = [[w.requires_grad_() for w in dense_of(place).values()] for place in range(BLOCKS)]
    params = [w for layer in whole for w in layer]
    sync, adam = GradientSync(params, group), AdamW(params, OPTIONS.lr, weight_decay=OPTIONS.weight_decay)
    most = 0

    def watched(place):
        def before():
            sliced.prefetch([place - 1])

        return before

    def counted(x_TD, *weights):
        nonlocal most
        most = max(most, len(sliced._whole) + len(sliced._fetching))
        return dense(x_TD, *weights)

    for step in range(STEPS):
        x_TD, upstream_TD = tokens(group, step)
        y_TD = z_TD = x_TD
        for place in range(BLOCKS):
            sliced.prefetch([place + 1])
            y_TD = y_TD + visit(sliced, place, counted, y_TD, before_backward=watched(place))
            z_TD = z_TD + dense(z_TD, *whole[place])
        for param in params:
            param.grad = None
        y_TD.backward(upstream_TD)
        z_TD.backward(upstream_TD)
        sync.finish()
        sliced.step()
        adam.step()
        check_finished()
        wrong += ["output"] * (not torch.equal(y_TD, z_TD)) if step == 0 else []
    for place in range(BLOCKS):
        pairs = zip(sliced.layer(place), whole[place])
        wrong += [f"layer {place}" for found, expected in pairs if differs(found, expected, group.size)]
    padded = -(-sum(w.numel() for w in whole[0]) // (64 * group.size)) * 64
    wrong += ["slice"] * any(len(part) != padded for part in sliced.slices)
    return wrong + [f"{most} layers at once"] * (most > 2)


def a_prefetched_model_equals_the_plain_one(group):
    """Outputs and all parameters after three steps, ahead or not; every use finds its copy done or on the way."""
    wrong = []
    expected = trained_plainly(group)
    for ahead in AHEAD:
        with tempfile.TemporaryDirectory() as folder:
            counts, found = trained_with_storage(group, ahead, Path(folder) / "s")
        for name, tensor in expected.items():
            wrong += [f"{ahead}: {name}"] * differs(found[name], tensor, group.size)
        is_ahead = ahead in ("vertical", "2d")
        wrong += [f"{ahead}: {counts}"] * (is_ahead and counts.slot_hits < counts.uses)
    return wrong


def trained_with_storage(group, ahead, folder):
    """Counts, and every tensor by name."""
    layout, plain = layout_of(WORK), [plain_layer(group, place) for place in range(BLOCKS)]
    experts = {
        (place, number): dict(zip(layout.shapes, [p.detach() for p in expert.parameters()]))
        for place, layer in enumerate(plain)
        for number, expert in zip(own_experts(group), layer.experts)
    }
    storage = HierarchicalStorage(create_store(folder, layout, experts), make_policy("moesys", 4), 3)
    stored = StoredExperts(storage, OPTIONS)
    moe = [StoredMoELayer(WORK, group, DROPLESS, CPU, FP64, stored, place) for place in range(BLOCKS)]
    for layer, other in zip(moe, plain):
        layer.gate.load_state_dict(other.gate.state_dict())
    sliced = SlicedLayers([dense_of(place) for place in range(BLOCKS)], group, OPTIONS)
    model = PrefetchedModel(sliced, dense, moe, ahead)
    routers = [layer.gate.weight_ED for layer in moe]
    sync, adam = GradientSync(routers, group), AdamW(routers, OPTIONS.lr, weight_decay=OPTIONS.weight_decay)
    found = {}
    for step in range(STEPS):
        x_TD, upstream_TD = tokens(group, step)
        for router in routers:
            router.grad = None
        y_TD, aux = model(x_TD)
        backward(y_TD, aux, upstream_TD, group)
        sync.finish()
        adam.step()
        model.step()
        stored.commit(step + 1)
        check_finished()
        found |= {f"y {step}": y_TD.detach(), f"aux {step}": aux.detach()}
    for place in range(BLOCKS):
        found |= {f"dense {place} {i}": tensor for i, tensor in enumerate(sliced.layer(place))}
        found[f"router {place}"] = routers[place].detach()
        for number in own_experts(group):
            parameters = stored.parameters((place, number)).values()
            found |= {f"expert {place} {number} {i}": tensor for i, tensor in enumerate(parameters)}
    storage.close()
    return storage.counts, found


def trained_plainly(group):
    """The same names without storage or slices. Experts without rows on any rank are left alone, as there."""
    moe = [plain_layer(group, place) for place in range(BLOCKS)]
    whole = [[w.requires_grad_() for w in dense_of(place).values()] for place in range(BLOCKS)]
    shared = [*[layer.gate.weight_ED for layer in moe], *[w for layer in whole for w in layer]]
    sync, adam = GradientSync(shared, group), AdamW(shared, OPTIONS.lr, weight_decay=OPTIONS.weight_decay)
    experts = [expert for layer in moe for expert in layer.experts]
    adams = [AdamW(expert.parameters(), OPTIONS.lr, weight_decay=OPTIONS.weight_decay) for expert in experts]
    found = {}
    for step in range(STEPS):
        for param in [*shared, *[p for expert in experts for p in expert.parameters()]]:
            param.grad = None
        y_TD, upstream_TD = tokens(group, step)
        losses = []
        for layer, weights in zip(moe, whole):
            y_TD = y_TD + dense(y_TD, *weights)
            z_TD, aux = layer(y_TD)
            y_TD = y_TD + z_TD
            losses.append(aux)
        aux = torch.stack(losses).sum()
        backward(y_TD, aux, upstream_TD, group)
        sync.finish()
        adam.step()
        for expert, own in zip(experts, adams):
            if any(p.grad.any() for p in expert.parameters()):
                own.step()
        found |= {f"y {step}": y_TD.detach(), f"aux {step}": aux.detach()}
    for place, (layer, weights) in enumerate(zip(moe, whole)):
        found |= {f"dense {place} {i}": tensor.detach() for i, tensor in enumerate(weights)}
        found[f"router {place}"] = layer.gate.weight_ED.detach()
        for number, expert in zip(own_experts(group), layer.experts):
            found |= {f"expert {place} {number} {i}": p.detach() for i, p in enumerate(expert.parameters())}
    return found
