"""Megatron's router: who goes where as a dense map [T, E] with weights beside it, and who is dropped.

Operator by operator `topk_routing_with_score_function`, `sinkhorn_load_balancing` and `apply_router_token_dropping` of
core 0.16, but for choices by `torch.topk`, which leaves ties to chance. The conventions fill in what Megatron fixes:
the rounding of capacity, and arrival order where its policy `position` ranks equal keys.

T tokens of a rank, E experts, K choices, C slots of each (source rank, expert), G groups of experts, D model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.host import read_ints
from moebench.kernels.topk import topk
from moebench.systems.layer import Router
from moebench.workloads.conventions import Conventions
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import sigmoid, sinkhorn
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.noise import jitter
from moebench.workloads.layer import GateSpec


@dataclass(frozen=True)
class Routes:
    """Where the tokens of a rank go.

    Attributes:
        map_TE: bool, the rows that the experts compute; under `padded` C in every column, of which some have weight 0.
        weights_TE: what multiplies an expert's output, 0 where there is no route; differentiable.
        experts_TK: the choices, dropped ones too; None where only the map is known.
    """

    map_TE: Tensor
    weights_TE: Tensor
    experts_TK: Tensor | None


class MegatronRouter(Router):
    """The router's product with the casts taken again in the backward: what is kept for it is not in the wide dtype."""

    def forward(self, x_TD: Tensor) -> Tensor:
        """Logits [T, E] in the gate's dtype."""
        assert self.weight_ED is not None
        if self.jitters and self.training:
            x_TD = jitter(x_TD.to(self.gate_dtype))
        return gating_linear(x_TD, self.weight_ED, self.gate_dtype)


def gating_linear(x_TD: Tensor, w_ED: Tensor, dtype: torch.dtype) -> Tensor:
    """`x w^T` in another dtype; the casts are taken again in the backward."""
    return _GatingLinear.apply(x_TD, w_ED, dtype)


class _GatingLinear(torch.autograd.Function):
    """`router_gating_linear`: x w^T in another dtype."""

    @staticmethod
    def forward(ctx, x_TD, w_ED, dtype):
        ctx.dtype = dtype
        ctx.save_for_backward(x_TD, w_ED)
        return torch.mm(x_TD.to(dtype), w_ED.to(dtype).t())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TE):
        x_TD, w_ED = ctx.saved_tensors
        grad_x_TD = grad_w_ED = None
        if ctx.needs_input_grad[0]:
            grad_x_TD = torch.mm(grad_TE, w_ED.to(ctx.dtype)).to(x_TD.dtype)
        if ctx.needs_input_grad[1]:
            grad_w_ED = torch.mm(grad_TE.t(), x_TD.to(ctx.dtype)).to(w_ED.dtype)
        return grad_x_TD, grad_w_ED, None


def route(logits_TE: Tensor, gate: GateSpec, conventions: Conventions, context: GateContext) -> Routes:
    """The choices of every token with their weights, before anyone is dropped."""
    if gate.name == "sinkhorn":
        return _sinkhorn(logits_TE, gate, context)
    if gate.name == "sigmoid":
        weights_TK, experts_TK = _by_sigmoid(logits_TE, gate, conventions, context)
    elif conventions.normalisation == "none":  # pre-softmax
        weights_TK, experts_TK = topk(softmax(logits_TE), gate.top_k)
    else:  # post-softmax: the largest logits, and a softmax over them
        chosen_TK, experts_TK = topk(logits_TE, gate.top_k)
        weights_TK = softmax(chosen_TK)
    weights_TE = torch.zeros_like(logits_TE).scatter(1, experts_TK, weights_TK)
    return Routes(map_of(experts_TK, logits_TE), weights_TE, experts_TK)


def softmax(logits: Tensor) -> Tensor:
    """Softmax in fp32, or in fp64 for fp64, which Megatron rounds to fp32; given back in the logits' dtype."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.softmax(logits, dim=-1, dtype=wide).to(logits.dtype)


def map_of(experts_TK: Tensor, logits_TE: Tensor) -> Tensor:
    """True at every choice, bool [T, E]."""
    return torch.zeros_like(logits_TE).int().scatter(1, experts_TK, 1).bool()


def _by_sigmoid(
    logits_TE: Tensor, gate: GateSpec, conventions: Conventions, context: GateContext
) -> tuple[Tensor, Tensor]:
    """Scores with a bias choose, scores alone weigh; weights [T, K] and experts."""
    options = gate_options.read(sigmoid.Options, gate)
    scores_TE = torch.sigmoid(logits_TE)
    experts_TK = _grouped_topk(scores_TE + context.state[sigmoid.STATE], gate.top_k, options)
    weights_TK = torch.gather(scores_TE, 1, experts_TK)
    if conventions.normalisation == "before-drop" and gate.top_k > 1:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK if options.scale == 1 else weights_TK * options.scale, experts_TK


def _grouped_topk(scores_TE: Tensor, top_k: int, options: sigmoid.Options) -> Tensor:
    """`group_limited_topk`: experts of the groups with the largest sums of their best scores; [T, K]."""
    if options.kept_groups < options.groups:
        tokens, experts = scores_TE.shape
        scores_TGS = scores_TE.view(tokens, options.groups, experts // options.groups)
        sums_TG = scores_TGS.topk(options.group_scores, dim=-1)[0].sum(dim=-1)
        kept = topk(sums_TG, options.kept_groups)[1]
        is_kept_TG = torch.zeros_like(sums_TG).scatter_(1, kept, 1)
        is_kept_TE = is_kept_TG.unsqueeze(-1).expand(scores_TGS.shape).reshape(tokens, experts)
        scores_TE = scores_TE.masked_fill(is_kept_TE.bool().logical_not(), float("-inf"))
    return topk(scores_TE, top_k)[1]


def _sinkhorn(logits_TE: Tensor, gate: GateSpec, context: GateContext) -> Routes:
    """`sinkhorn_load_balancing`: in training the largest of the balanced matrix, else of the scores; no loss."""
    scores_TE = torch.sigmoid(logits_TE) if gate.top_k == 1 else softmax(logits_TE)
    chooser_TE = scores_TE.detach()
    if context.training:
        with torch.no_grad():
            chooser_TE = balanced(logits_TE.float(), gate_options.read(sinkhorn.Options, gate))
    experts_TK = topk(chooser_TE, gate.top_k)[1]
    map_TE = map_of(experts_TK, logits_TE)
    return Routes(map_TE, scores_TE * map_TE, experts_TK)


def balanced(logits_TE: Tensor, options: sinkhorn.Options) -> Tensor:
    """exp(logits) with rows and columns scaled to sums of 1/T and 1/E; one host read a round.

    A row's largest logit is taken off first, which changes no factor of a column and keeps exp finite. It ends by the
    gate's rule, the change of the factors' logarithms: Megatron's is the change of the factors.
    """
    tokens, experts = logits_TE.shape
    if tokens == 0:
        return logits_TE
    cost_TE = torch.exp(logits_TE - logits_TE.amax(dim=1, keepdim=True))
    factor_E, eps = cost_TE.new_ones(experts), 1e-8
    for rounds in range(1, options.most_rounds + 1):
        factor_T = (1 / tokens) / (torch.sum(factor_E * cost_TE, 1) + eps)
        new_E = (1 / experts) / (torch.sum(factor_T.unsqueeze(1) * cost_TE, 0) + eps)
        is_still = torch.mean(torch.abs(torch.log(new_E) - torch.log(factor_E))) <= options.tolerance
        factor_E = new_E
        # Under trace the number of rounds is known: it is still after the last.
        if read_ints(torch.where(is_still, rounds, 0), "rounds")[0] == rounds:
            break
    return factor_E * cost_TE * factor_T.unsqueeze(1)


def drop(routes: Routes, capacity: int, conventions: Conventions, pads: bool) -> Routes:
    """`apply_router_token_dropping`: at most C tokens of each expert; exactly min(C, T) where it `pads`.

    Padding rows are tokens that the expert did not get, with weight 0, as in Megatron.
    """
    tokens = len(routes.map_TE)
    if capacity >= tokens:
        kept_TE = torch.ones_like(routes.map_TE)
    else:
        key_TE = _priority(routes, conventions)
        chosen_CE = torch.topk(key_TE, k=capacity, dim=0, sorted=False)[1]
        kept_TE = torch.zeros_like(routes.weights_TE).scatter(0, chosen_CE, 1).bool()
    map_TE = kept_TE if pads else torch.logical_and(routes.map_TE, kept_TE)
    return Routes(map_TE, routes.weights_TE * map_TE, routes.experts_TK)


def _priority(routes: Routes, conventions: Conventions) -> Tensor:
    """By what C tokens of an expert are chosen, [T, E], larger first: weights (`probs`), or arrival (`position`)."""
    if conventions.drop_order == "probability":
        return routes.weights_TE.detach()
    assert routes.experts_TK is not None
    tokens, top_k = routes.experts_TK.shape
    arrival_TK = torch.arange(tokens, device=routes.map_TE.device, dtype=torch.int32).unsqueeze(1).expand(-1, top_k)
    if conventions.choice_order == "choice-major":
        choice_K = torch.arange(0, top_k * tokens, tokens, device=routes.map_TE.device, dtype=torch.int32)
        arrival_TK = arrival_TK + choice_K
    none_TE = torch.zeros_like(routes.map_TE, dtype=torch.int32)
    return none_TE.scatter(1, routes.experts_TK, tokens * top_k - arrival_TK)
