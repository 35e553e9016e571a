"""What ranks run of the released gate; a check returns words."""

import torch

from moebench.kernels.collectives.outstanding import check_finished
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.explicit import count
from moebench.kernels.topk import topk
from moebench.systems.moesys.released_gate import (
    PlainReleasedMoE,
    ReleasedLayers,
    ReleasedMoE,
    capacity_of,
    kept_routes,
)
from moebench.workloads.layer import GateSpec
from moebench.workloads.models.shape import GPT2MoEShape

CPU, FP64 = torch.device("cpu"), torch.float64
SHAPE = GPT2MoEShape(1, 8, 2, 16, 8, 3, sequence=7, gate=GateSpec("topk", 2), positions=8, vocabulary=16)


def layer_of(group, kind, popular):
    """A layer with the weights that every kind of it has; with a popular expert, everybody wants it first."""
    layers = ReleasedLayers(kind)
    layer = layers(SHAPE, group, CPU, FP64)
    for place, parameter in enumerate(layer.parameters()):
        is_own = getattr(parameter, "is_expert", False)
        generator = torch.Generator().manual_seed(10 * place + (1 + group.index if is_own else 0))
        parameter.data.normal_(generator=generator)
    if popular:
        layer.router_ED.data[3] = 0.0
        layer.router_ED.data[3, 0] = 9.0
    layers.begin()
    return layer


def tokens(group):
    """This rank's, each with a large first column."""
    generator = torch.Generator().manual_seed(50 + group.index)
    x_TD = torch.randn(SHAPE.tokens, SHAPE.d_model, dtype=FP64, generator=generator)
    x_TD[:, 0] = x_TD[:, 0].abs() + 1
    return x_TD.requires_grad_()


def released_layer_equals_its_definition(group):
    """Output, gradients of input and weights, the auxiliary loss's in them, where experts overflow or not."""
    wrong = []
    for popular in (False, True):
        found = []
        for kind in (ReleasedMoE, PlainReleasedMoE):
            layer, x_TD = layer_of(group, kind, popular), tokens(group)
            y_TD = layer(x_TD)
            y_TD.backward(torch.cos(torch.arange(y_TD.numel(), dtype=FP64)).view(y_TD.shape))
            found.append({"y": y_TD.detach(), "x": x_TD.grad} | {n: p.grad for n, p in layer.named_parameters()})
        check_finished()
        for name, ours in found[0].items():
            scale = found[1][name].abs().max().clamp(min=1e-30)
            # The gate computes in fp32.
            wrong += [f"popular={popular}: {name}"] * (not float((ours - found[1][name]).abs().max() / scale) < 1e-4)
    return wrong


def released_gate_keeps_what_is_counted_without_ranks(group):
    """Each expert's routes of each rank; those that everybody wants are full, and the first ranks have their places."""
    wrong = []
    for popular in (False, True):
        layer, x_TD = layer_of(group, ReleasedMoE, popular), tokens(group).detach()

        def logits_of(rank, layer=layer):
            other = type("Rank", (), {"index": rank})
            return torch.mm(tokens(other).detach().float(), layer.router_ED.detach().float().t())

        counted_RE = kept_routes(SHAPE, group.size, logits_of)
        values_TK, chosen_TK = topk(torch.mm(x_TD.float(), layer.router_ED.detach().float().t()), 2)
        kept_E = count(layer.kept(chosen_TK, values_TK), SHAPE.experts)
        wrong += [f"popular={popular}: counts"] * (not torch.equal(kept_E, counted_RE[group.index]))
        loads_E = all_reduce(kept_E, group)
        room = capacity_of(SHAPE)
        wrong += [f"popular={popular}: too many"] * bool((loads_E > room).any())
        if popular:
            # All tokens of all ranks want it: 21 each, of which 26 find room in all.
            wanted = [min(SHAPE.tokens, max(room - rank * SHAPE.tokens, 0)) for rank in range(group.size)]
            wrong += ["the first ranks come first"] * (counted_RE[:, 3].tolist() != wanted)
            dropped = 2 * SHAPE.tokens - int(kept_E.sum())
            wrong += ["nobody was dropped"] * (group.index > 1 and dropped < SHAPE.tokens)
    return wrong
