"""What ranks run in the tests of this folder; apart, so that a rank does not import pytest. A check returns words."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product

import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.collectives.start_wait import all_gather
from moebench.program import BACKWARD
from moebench.systems.megascale import attention, experts
from moebench.systems.megascale.chain import KEPT, kept_elements
from moebench.systems.megascale.layer import DecoderLayer
from moebench.systems.megascale.macro import ListedLayer
from moebench.systems.megascale.plain import plain_balance, plain_layer
from moebench.systems.megascale.sharded import ShardedAdamW
from moebench.systems.megascale.stage import DecoderStage
from moebench.systems.megascale.volumes import Sizes, printed, sent
from moebench.systems.megascale.weights import part, random_weights
from moebench.trace.recorder import Recorder
from moebench.workloads.models.decoder import DecoderModel, DecoderShape
from tests.systems.megascale import gradients_on_ranks as gradients
from tests.systems.megascale.sent_by import sent_by
from tests.systems.megascale.sync_on_ranks import sums_over_nodes_are_sums

S, B = 8, 4
SHAPE = DecoderShape(16, 8, 4, 4, 8, 8, 3, shared_ffn=8)
SHAPES = {
    "shared": SHAPE,
    "normed": replace(SHAPE, shared_ffn=0, qk_norm=True, renormalises=False, top_k=1),
    "crowded": replace(SHAPE, top_k=2),  # every first choice is expert 0
    "bare": replace(SHAPE, shared_ffn=0, renormalises=False),
    "wide": replace(SHAPE, kv_heads=8, qk_norm=True),  # a head for each of eight ranks
}
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def whole(name, dtype=torch.float64):
    """Shape, weights, input and upstream gradient of whole sequences."""
    shape = SHAPES[name]
    weights = random_weights(shape, dtype, seed=1)
    torch.manual_seed(2)
    x = torch.randn(S, B, shape.d_model, dtype=dtype)
    if name == "crowded":
        weights.router_DE[:, 0] = 0
        weights.router_DE[:, 1:] *= 1e-3
        weights.router_DE[0, 0] = 1.0
        weights.norm2_D[0] = 50.0
        x[:, :, 0] = x[:, :, 0].abs() + 30
    return shape, weights, x, torch.randn(S, B, shape.d_model, dtype=dtype)


@cache
def expected(name, axis, ranks, devices, factor=None):
    """Of the definition: output, each rank's auxiliary loss on its rows, cut along `axis`, gradients of the output and
    of all ranks' losses, choices."""
    shape, weights, x, upstream = whole(name)
    leaves = [tensor.requires_grad_() for tensor in weights.named().values()]
    x.requires_grad_()
    y, probs, chosen = plain_layer(x, weights, shape, devices, factor)
    probs, chosen = probs.view(S, B, -1), chosen.view(S, B, -1)
    both = [[part(one, axis, rank, ranks).flatten(0, 1) for one in (probs, chosen)] for rank in range(ranks)]
    aux = [plain_balance(*one, devices) for one in both]
    grads = torch.autograd.grad([y, sum(aux)], [x, *leaves], [upstream, torch.ones_like(aux[0])], allow_unused=True)
    zeros = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip([x, *leaves], grads)]
    return y.detach(), [one.detach() for one in aux], zeros[0], dict(zip(weights.named(), zeros[1:])), chosen


def gradients_of_all(layer):
    """The gradients in the layout of whole weights, put together from all ranks."""
    found = {}
    for name, tensor in layer.summed_gradients().items():
        parts = all_gather(tensor.contiguous().unsqueeze(0), layer.group)
        cut = layer.cuts[name]
        found[name] = parts[0] if cut is None else torch.cat(list(parts), cut)
    return found


def step(layer, x, upstream):
    """Output, auxiliary loss and input gradient of this rank's rows."""
    own = layer.own_rows(x).requires_grad_()
    y, aux = layer(own)
    torch.autograd.backward([y, aux], [layer.own_rows(upstream), torch.ones_like(aux)])
    return y.detach(), aux.detach(), own.grad


def step_and_definition(layer, done, wanted):
    """By name what a step gave, the gradients of all weights too, and what the definition gives."""
    y, aux, x_grad, w_grads, _ = wanted
    found, aux = gradients_of_all(layer), aux[layer.group.index]
    pairs = {"y": (done[0], layer.own_rows(y)), "aux": (done[1], aux), "dx": (done[2], layer.own_rows(x_grad))}
    return pairs | {name: (found[name], grad) for name, grad in w_grads.items()}


def differences(what, layer, done, wanted):
    """What of a step is not the definition's."""
    wrong = []
    for name, (ours, theirs) in step_and_definition(layer, done, wanted).items():
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, **CLOSE):
            worst = (ours - theirs).abs().max() if ours.shape == theirs.shape else (ours.shape, theirs.shape)
            wrong.append(f"{what} {name}: {worst}")
    return wrong


def strategies_equal_the_definition(group, name):
    """Outputs, input gradients and weight gradients, under every pair of strategies or three pairs of them."""
    shape, weights, x, upstream = whole(name)
    wrong = []
    pairs = list(product(attention.STRATEGIES, experts.STRATEGIES))
    for by in {"shared": pairs, "normed": pairs[1::5], "crowded": pairs[::5]}[name]:
        layer = DecoderLayer(shape, S, B, group, *by, dtype=torch.float64)
        layer.load(weights)
        devices = 1 if by[1] == "tp" else group.size
        wanted = expected(name, 1 if by[0] == "dp" else 0, group.size, devices)
        if name == "crowded" and not bool((wanted[-1][..., 0] == 0).all()):
            wrong.append("the router is not crowded")
        wrong += differences(by, layer, step(layer, x, upstream), wanted)
    return wrong


def balanced(ranks):
    """Shape, sizes, weights and input under which every expert gets as many of each rank's tokens: no attention output,
    one-hot rows, two logits each that stand out."""
    shape = DecoderShape(64, 8, 4, 8, 8, 8, 2)
    sizes = Sizes(B, S, shape.d_model, ranks, shape.heads / shape.kv_heads, shape.top_k)
    weights, x = random_weights(shape, seed=1), torch.zeros(S, B, shape.d_model)
    weights.norm2_D[:] = 1.0
    for name in ("out_QD", "router_DE"):
        getattr(weights, name).zero_()
    for column in range(shape.experts):
        weights.router_DE[column, column], weights.router_DE[column, (column + 4) % 8] = 1.0, 0.9
    hot_SB = (torch.arange(S).unsqueeze(1) + 2 * torch.arange(B)) % 8  # every rank has each, however rows are dealt
    x.scatter_(2, hot_SB.unsqueeze(2), 1.0)
    return shape, sizes, weights, x


def waits_without_work(ops):
    """Collectives of the backward that nothing runs beside: no operator between start and wait that takes time."""
    found = []
    for op in ops:
        for start in op.waits_on if op.phase == BACKWARD else ():
            between = [one for one in ops[start + 1 : op.index] if one.bytes and one.kind not in ("collective", "wait")]
            if not between:
                found.append(f"{ops[start].name} of {ops[start].shapes[0]}")
    return found


def devices_with_a_capacity_equal_the_definition(group):
    """Routes with the least weights of a device are dropped; NaN in rows of nobody reaches no one."""
    wrong = []
    for name, by, factor in (("bare", "sp", 0.7), ("shared", "dp", 0.9)):
        shape, weights, x, upstream = whole(name)
        layer = DecoderLayer(shape, S, B, group, by, dtype=torch.float64, capacity_factor=factor)
        layer.load(weights)
        axis = 1 if by == "dp" else 0
        wanted = expected(name, axis, group.size, group.size, factor)
        with poisoned_memory():
            done = step(layer, x, upstream)
        wrong += differences(f"{name} {by} {factor}", layer, done, wanted)
        if torch.allclose(wanted[0], expected(name, axis, group.size, group.size)[0]):
            wrong.append(f"{name}: nobody is dropped")
    return wrong


@contextmanager
def poisoned_memory():
    """Fresh memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills what `empty` gives
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def fp8_rows_are_near_the_definition(group):
    """The layer under `tp`, rows in FP8 and all else in float64: outputs and gradients within a tenth in the norm."""
    shape, weights, x, upstream = whole("shared")
    layer = DecoderLayer(shape, S, B, group, "tp", "tp", dtype=torch.float64, fp8=True)
    layer.load(weights)
    pairs = step_and_definition(layer, step(layer, x, upstream), expected("shared", 0, group.size, 1))
    off = {name: float((one - other).norm() / other.norm()) for name, (one, other) in pairs.items()}
    exact = 1e-12 if group.size == 1 else 0.1
    wrong = [f"{name}: off by {value}" for name, value in off.items() if value > exact]
    return wrong + (["nothing is rounded"] if group.size > 1 and off["y"] < 1e-4 else [])


def training_is_the_same_with_bf16_gradients(group):
    """A small model, data parallel, twenty steps of sharded Adam on each way's gradients: losses within 0.01 nats."""
    model = DecoderModel("small", "Small", 2, SHAPES["bare"], 32)
    losses = {}
    for way in ("fp32-reduce-scatter", "bf16-all-to-all"):
        stage = DecoderStage(model, 2, S, 2, described_group(1))
        generator = torch.Generator().manual_seed(3)
        for weight in stage.parameters():
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1 + (weight.dim() == 1))
        optimiser = ShardedAdamW(stage.parameters(), group, way, lr=5e-3)
        data = torch.Generator().manual_seed(10 + group.index)
        losses[way] = []
        for _ in range(20):
            first = torch.randint(32, (1, 2), generator=data)
            ids = (first + 3 * torch.arange(S + 1).unsqueeze(1)) % 32
            loss, aux = stage(ids[:-1], ids[1:])
            (loss + 0.01 * aux).backward()
            optimiser.accumulate()
            optimiser.step(1 / group.size)
            losses[way].append(loss.item())
    fp32, bf16 = (torch.tensor(one) for one in losses.values())
    wrong = [] if fp32[-1] < fp32[0] - 0.5 else [f"nothing is learnt: {fp32[0]} to {fp32[-1]}"]
    gap = float((fp32 - bf16).abs().max())
    return wrong if gap < 0.01 else [*wrong, f"losses differ by {gap}"]


def runs_beside_products(ops):
    """Of each collective of rows, in the order of their starts, whether a product runs between start and wait."""
    ends = {start: op.index for op in ops for start in op.waits_on}
    rows = [op for op in ops if op.collective is not None and len(op.shapes[0]) > 1 and op.shapes[0][-1] % 8 == 0]
    return [any(one.kind == "product" for one in ops[op.index : ends[op.index]]) for op in rows]


def chunks_equal_the_definition(group):
    """Pairs of products and collectives in two chunks: as the plain form, and everything that can overlaps."""
    wrong = []
    for name, by in (("shared", ("sp", "ep-ag")), ("crowded", ("sp", "ep-ag")), ("bare", ("cp", "tp"))):
        shape, weights, x, upstream = whole(name)
        layer = DecoderLayer(shape, S, B, group, *by, dtype=torch.float64, chunks=2)
        layer.load(weights)
        own = layer.own_rows(x).requires_grad_()
        upstreams = [layer.own_rows(upstream), torch.ones((), dtype=x.dtype)]
        with Recorder([*layer.weights.values(), own, *upstreams]) as recorder:
            ours, aux = layer(own)
            torch.autograd.backward([ours, aux], upstreams)
        # Of two chunks the first of a product's travels beside the second product, or the second beside the first one.
        # The backward goes the other way; tokens' gradients travel beside the weights' gradients too.
        order, found = [True, False, False, True, False, True, True, False], runs_beside_products(recorder.ops)
        of_pairs = [[False, True], [True, True], [False, True], [False, True]]
        back = [sorted(found[place : place + 2]) for place in range(8, len(found), 2)]
        if group.size > 1 and by == ("sp", "ep-ag") and (found[:8] != order or back != of_pairs):
            wrong.append(f"{name}: {found}")
        wanted = expected(name, 0, group.size, 1 if by[1] == "tp" else group.size)
        wrong += differences(f"{name} {by}", layer, (ours.detach(), aux.detach(), own.grad), wanted)
    return wrong


def what_is_made_again_is_the_same(group):
    """Under autograd too: outputs and gradients to the bit, whatever strategy."""
    wrong = []
    shape, weights, x, upstream = whole("shared", torch.float32)
    for by in (("sp", "ep-ag"), ("tp", "tp"), ("sp", "tp"), ("tp", "ep-ag"), ("cp", "ep-a2a")):
        found = []
        for recomputes in (False, True):
            layer = DecoderLayer(shape, S, B, group, *by, recomputes=recomputes)
            layer.load(weights)
            done = step(layer, x, upstream)
            found.append([*done, *(weight.grad for weight in layer.weights.values())])
        if not all(torch.equal(*both) for both in zip(*found)):
            wrong.append(f"{by}: something differs")
    return wrong


def bytes_equal_the_formulas(group):
    """What real ranks send in a forward, of rows; under balanced routing."""
    shape, sizes, weights, x = balanced(group.size)
    wrong = []
    for by in (("tp", "tp"), ("sp", "ep-a2a"), ("cp", "ep-ag"), ("dp", "ep-ag")):
        layer = DecoderLayer(shape, S, B, group, *by)
        layer.load(weights)
        own = layer.own_rows(x)
        with Recorder([*layer.weights.values(), own]) as recorder, torch.no_grad():
            layer(own)
        ops = recorder.ops
        first = next(op.index for op in ops if op.region == "gate")
        for what, part_ops in ((f"attention-{by[0]}", ops[:first]), (f"experts-{by[1]}", ops[first:])):
            found, wanted = sent_by(part_ops, group.index, 8), 4 * sent(sizes, what)
            if found != wanted:
                wrong.append(f"{by} {what}: {found} bytes, not {wanted}")
            halves = {"attention-sp", "attention-cp"}
            if group.size > 1 and what in halves and 2 * found != 4 * printed(sizes, what):
                wrong.append(f"{by} {what}: {found} is not half of what is printed")
    return wrong


def the_listed_layer_equals_the_definition(group):
    """Whatever is kept, with a shared expert and without, and crowded."""
    wrong = []
    cases = [("shared", "all", None), ("shared", "selective", None), ("crowded", "selective", None)]
    more = [("bare", "all", None, 1), ("bare", "selective", 0.7, 1), ("shared", "all", None, 2)]
    more += [("shared", "selective", None, 2), ("crowded", "selective", None, 2)]
    ways = [(*case, {}) for case in cases] + [(*case[:3], {"chunks": case[3]}) for case in more]
    ways += [("shared", keep, None, {"experts_by": "ep-a2a"}) for keep in KEPT]
    ways += [("crowded", "selective", None, {"experts_by": "ep-a2a"}), ("normed", "all", None, {})]
    ways += [("normed", "selective", None, how) for how in ({}, {"chunks": 2}, {"experts_by": "ep-a2a"})]
    for name, keep, factor, how in ways:
        shape, weights, x, upstream = whole(name)
        layer = ListedLayer(shape, S, B, group, keep, dtype=torch.float64, capacity_factor=factor, **how)
        layer.load(weights)
        wanted = expected(name, 0, group.size, group.size, factor)
        with poisoned_memory():
            done = step(layer, x, upstream)
        wrong += differences(f"{name} {keep} {how}", layer, done, wanted)
    return wrong


def kept_tensors_are_those_of_fig_9(group):
    """What autograd is given to keep, element by element: the two formulas, and what is listed besides; the selective
    choice has the same gradients to the bit, for one all-gather and one all-to-all more."""
    shape, sizes, weights, x = balanced(group.size)
    tokens, heads, ranks = S * B // group.size, shape.heads // group.size, group.size
    besides = 2 * tokens + B * heads * S + tokens * (shape.experts + shape.top_k) + ranks
    besides += S * B * shape.top_k + shape.experts // ranks + tokens * shape.top_k
    wrong = []
    for chunks in (1, 2):
        wrong += _kept_in_chunks(group, chunks, shape, sizes, weights, x, besides)
    return wrong + _rows_are_sent_beside_work(group, shape, weights, x)


def _rows_are_sent_beside_work(group, shape, weights, x):
    """Experts by all-to-all: the same gradients to the bit whatever is kept; of the selective choice, all overlaps."""
    wrong, gradients = [], []
    for keep in KEPT:
        layer = ListedLayer(shape, S, B, group, keep, experts_by="ep-a2a")
        layer.load(weights)
        own = layer.own_rows(x).requires_grad_()
        upstream = [layer.own_rows(torch.cos(torch.arange(x.numel()).float()).view(x.shape)), torch.ones(())]
        with Recorder([*layer.weights.values(), own, *upstream]) as recorder:
            torch.autograd.backward(layer(own), upstream)
        gradients.append([own.grad, *(weight.grad for weight in layer.weights.values())])
        wrong += [f"rows: {alone}" for alone in waits_without_work(recorder.ops) if keep == "selective"]
    return wrong if all(torch.equal(*both) for both in zip(*gradients)) else [*wrong, "rows: gradients differ"]


def _kept_in_chunks(group, chunks, shape, sizes, weights, x, besides):
    wrong, gradients, sent_back, ranks = [], {}, {}, group.size
    for keep in KEPT:
        layer = ListedLayer(shape, S, B, group, keep, chunks=chunks)
        layer.load(weights)
        own, kept = layer.own_rows(x).requires_grad_(), []
        upstream = [layer.own_rows(torch.sin(torch.arange(x.numel()).float()).view(x.shape)), torch.ones(())]
        with Recorder([*layer.weights.values(), own, *upstream]) as recorder:
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
                y, aux = layer(own)
            torch.autograd.backward([y, aux], upstream)
        held = {weight.data_ptr() for weight in layer.weights.values()}
        found = sum(one.numel() for one in kept if one.data_ptr() not in held) - besides
        wanted = kept_elements(sizes, shape.d_ffn / shape.d_model, keep)
        if found != wanted:
            wrong.append(f"{keep} {chunks}: {found} elements, not {wanted}")
        sent_back[keep] = sent_by([op for op in recorder.ops if op.phase == BACKWARD], group.index, 8)
        wrong += [f"{keep} {chunks}: {alone}" for alone in waits_without_work(recorder.ops) if keep == "selective"]
        gradients[keep] = [own.grad, *(weight.grad for weight in layer.weights.values())]
    if not all(torch.equal(*both) for both in zip(*gradients.values())):
        wrong.append("the gradients differ")
    again = 4 * (sent(sizes, "experts-tp") / 2 + sizes.elements / ranks * sizes.others)
    if sent_back["selective"] - sent_back["all"] != again:
        wrong.append(f"{sent_back} bytes, not {again} more")
    return wrong


def layers_of_eight_ranks(group):
    """Strategies whose heads, positions and experts go into eight parts, and the listed layers, as the definition."""
    shape, weights, x, upstream = whole("wide")
    wrong = []
    for by in (("sp", "ep-ag"), ("tp", "tp"), ("sp", "ep-a2a"), ("tp", "ep-a2a")):
        layer = DecoderLayer(shape, S, B, group, *by, dtype=torch.float64)
        layer.load(weights)
        wanted = expected("wide", 0, group.size, 1 if by[1] == "tp" else group.size)
        wrong += differences(by, layer, step(layer, x, upstream), wanted)
    for keep, how in (("selective", {}), ("selective", {"experts_by": "ep-a2a"}), ("all", {})):
        layer = ListedLayer(shape, S, B, group, keep, dtype=torch.float64, **how)
        layer.load(weights)
        wanted = expected("wide", 0, group.size, group.size)
        wrong += differences(f"listed {keep} {how}", layer, step(layer, x, upstream), wanted)
    return wrong


def all_checks(group):
    """Every check of one world, by name; one start of the ranks serves them all."""
    names = ("shared", "normed", "crowded")
    found = {f"strategies {name}": strategies_equal_the_definition(group, name) for name in names}
    found["bytes"] = bytes_equal_the_formulas(group)
    found["listed"] = the_listed_layer_equals_the_definition(group)
    found["kept"] = kept_tensors_are_those_of_fig_9(group)
    found["again"] = what_is_made_again_is_the_same(group)
    found["chunks"] = chunks_equal_the_definition(group)
    found["gradients"] = gradients.sums_are_within_their_errors(group)
    found["fp8"] = gradients.fp8_is_within_its_error(group)
    found["sharded"] = gradients.sharded_adam_is_adam(group)
    found["capacity"] = devices_with_a_capacity_equal_the_definition(group)
    found["fp8 layer"] = fp8_rows_are_near_the_definition(group)
    if group.size == 2:
        found["training"] = training_is_the_same_with_bf16_gradients(group)
    found["nodes"] = sums_over_nodes_are_sums(group)
    return found
