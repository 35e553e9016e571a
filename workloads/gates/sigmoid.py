"""Sigmoid scores, a bias that balances the experts without a loss, and a limit on groups (DeepSeek-V3).

DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, and Wang et al. 2024 (arXiv 2408.15664). Experts are chosen by score plus
bias and weighted by the score alone. After a training step the bias of an expert that had more tokens than the mean
falls by a fixed step, that of one that had fewer rises. With groups, only experts of a token's best groups are in the
race: those with the largest sum of their two best scores (DeepSeek's code; Megatron sums K / groups of them).

T tokens, E experts, G groups of S experts, K choices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import InputError
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.gate import Gate
from moebench.workloads.layer import GateSpec

STATE = "bias_E"


@dataclass(frozen=True)
class Options:
    """What the rule leaves open.

    Attributes:
        groups: G, runs of E / G experts; 8 in DeepSeek-V3, its nodes.
        kept_groups: groups that a token's experts may come from; 4 in DeepSeek-V3.
        group_scores: how many of a group's best scores are summed to rank it.
        scale: multiplies the weights after normalisation; 2.5 in DeepSeek-V3.
        rate: step of the bias.
        balance: weight of a balance loss beside one that is 1 at balance, over choices without bias and groups; 0.0001
            in DeepSeek-V3, which takes it sequence by sequence, here over all tokens of the rank. 0 leaves it out.
    """

    groups: int = 1
    kept_groups: int = 1
    group_scores: int = 2
    scale: float = 1.0
    rate: float = 0.001
    balance: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("kept_groups", 1), ("group_scores", 1), ("scale", 0), ("rate", 0), ("balance", 0)):
            gate_options.at_least(name, getattr(self, name), least)
        if self.kept_groups > self.groups:
            raise InputError(f"kept_groups = {self.kept_groups}: must be at most groups = {self.groups}")


def choose(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """The rule `sigmoid`, any K: a `moebench.workloads.gates.context.Rule`."""
    options = gate_options.read(Options, gate)
    probs_TE = logits_TE.sigmoid()
    biased_TE = probs_TE.detach() + context.state[STATE].to(probs_TE.dtype)
    if options.kept_groups < options.groups:
        biased_TE = biased_TE.masked_fill(~in_best_groups(biased_TE, options), -torch.inf)
    experts_TK = steps.ranked(biased_TE, gate.top_k)
    weights_TK = steps.weights_of(probs_TE, experts_TK, conventions) * options.scale
    terms = {}
    if options.balance:
        choices_TK = steps.ranked(probs_TE.detach(), gate.top_k)
        loss = steps.balance_loss(steps.normalised(probs_TE), choices_TK, conventions)
        terms["balance"] = options.balance * loss
    return Choice(experts_TK, weights_TK, probs_TE, terms)


def in_best_groups(scores_TE: Tensor, options: Options) -> Tensor:
    """Whether an expert is in one of the token's `kept_groups` best groups, bool [T, E]; ties to the lowest group."""
    tokens, experts = scores_TE.shape
    scores_TGS = scores_TE.view(tokens, options.groups, experts // options.groups)
    best = torch.sort(scores_TGS, dim=2, descending=True, stable=True).values[:, :, : options.group_scores]
    kept = steps.ranked(best.sum(dim=2), options.kept_groups)
    inside_TG = torch.zeros(tokens, options.groups, dtype=torch.bool, device=scores_TE.device).scatter(1, kept, True)
    return inside_TG.unsqueeze(2).expand(scores_TGS.shape).reshape(tokens, experts)


def state(gate: GateSpec, experts: int) -> dict[str, Tensor]:
    """No bias at first."""
    return {STATE: torch.zeros(experts)}


def update(state: Mapping[str, Tensor], counts_E: Tensor, gate: GateSpec) -> dict[str, Tensor]:
    """The bias after a step: up by `rate` below the mean count, down above, unchanged at it; compared in integers.

    Args:
        counts_E: int64 routes to each expert over all ranks, before capacity.
    """
    excess_E = counts_E * len(counts_E) - counts_E.sum()
    return {STATE: state[STATE] - gate_options.read(Options, gate).rate * excess_E.sign()}


def limits(gate: GateSpec, experts: int) -> str | None:
    """Groups have equally many experts, and the kept ones K of them."""
    options = gate_options.read(Options, gate)
    if experts % options.groups:
        return f"gate sigmoid: experts = {experts} is no multiple of groups = {options.groups}"
    room = options.kept_groups * (experts // options.groups)
    if gate.top_k > room:
        return (
            f"gate sigmoid picks top_k = {gate.top_k} experts in kept_groups = {options.kept_groups} groups, "
            f"and with experts = {experts} these have {room}"
        )
    return None


def exact(gate: GateSpec, tokens: int, experts: int, start: int) -> Tensor:
    """Balanced choices [T, K] in at most `kept_groups` groups: groups in turn, and inside them experts in turn."""
    options = gate_options.read(Options, gate)
    size = experts // options.groups
    turn_T1, choice_K = torch.arange(tokens)[:, None] + start, torch.arange(gate.top_k)
    group_TK = (turn_T1 + choice_K % options.kept_groups) % options.groups
    inside_TK = (turn_T1 // options.groups + choice_K // options.kept_groups) % size
    return group_TK * size + inside_TK


SIGMOID = Gate(
    name="sigmoid",
    title="Sigmoid with bias",
    formula="s = sigmoid(logits); the K largest s + b in the best groups; b rises where an expert has few tokens",
    weight="s_e",
    default_top_k=8,
    choose=choose,
    source="DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; Wang et al. 2024 (arXiv 2408.15664)",
    aux="none; with the option balance E/K sum P_e f_e of s / sum s",
    conventions={"noise": ("none",), "normalisation": ("none", "before-drop")},
    options=Options,
    state=state,
    update=update,
    limits=limits,
    exact=exact,
)
