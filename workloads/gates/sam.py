"""SAM (Switch and Mixture): one group of experts a token, then the K best experts inside it.

Jiang et al. 2021 (arXiv 2110.07431); the losses as Hsword/Hetu 722ba6a names them. All K experts of a token can so live
on one device. Groups are runs of experts that differ in size by at most one, so any E and any number of groups will do;
Hetu's own kernels agree with each other only where E is the square of the number of groups.

T tokens, E experts, G groups, K choices.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.gate import Gate
from moebench.workloads.layer import GateSpec


@dataclass(frozen=True)
class Options:
    """What the rule leaves open.

    Attributes:
        groups: number of groups G; 8 in Hetu, the GPUs of a node.
        alignment: weight of the alignment loss, a mean over tokens, beside a balance loss that is 1 at balance.
    """

    groups: int = 8
    alignment: float = 1.0

    def __post_init__(self) -> None:
        gate_options.at_least("groups", self.groups, 1)
        gate_options.at_least("alignment", self.alignment, 0)


def choose(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """The rule `sam`, any K up to the smallest group: a `moebench.workloads.gates.context.Rule`."""
    options = gate_options.read(Options, gate)
    probs_TE = logits_TE.softmax(dim=1)
    group_E = groups_of(probs_TE.shape[1], options.groups, probs_TE.device)
    plain_TE = probs_TE.detach()
    inside_TE = group_E == steps.ranked(group_scores(plain_TE, options.groups), 1)
    experts_TK = steps.ranked(plain_TE.masked_fill(~inside_TE, -1.0), gate.top_k)
    weights_TK = steps.weights_of(probs_TE, experts_TK, conventions)
    terms = {"balance": steps.balance_loss(probs_TE, experts_TK, conventions)}
    alignment = conventions.auxiliary * options.alignment * alignment_loss(probs_TE, experts_TK, inside_TE)
    return Choice(experts_TK, weights_TK, probs_TE, terms | {"alignment": alignment})


def groups_of(experts: int, groups: int, device: torch.device | None = None) -> Tensor:
    """The group of every expert, int64 [E], rising; sizes differ by at most one."""
    return torch.arange(experts, device=device) * groups // experts


def group_scores(probs_TE: Tensor, groups: int) -> Tensor:
    """The sum of each group's probabilities [T, G]."""
    tokens, experts = probs_TE.shape
    if experts % groups == 0:
        return probs_TE.view(tokens, groups, experts // groups).sum(dim=2)
    return probs_TE.new_zeros(tokens, groups).index_add(1, groups_of(experts, groups, probs_TE.device), probs_TE)


def alignment_loss(probs_TE: Tensor, experts_TK: Tensor, inside_TE: Tensor) -> Tensor:
    """Mean over tokens of sum over e outside the chosen group of max(0, p_e - p_k): better experts elsewhere cost.

    p_k is the smallest chosen probability; it carries no gradient, as in Hetu.
    """
    least_T1 = probs_TE.detach().gather(1, experts_TK[:, -1:])
    return ((probs_TE - least_T1).relu() * ~inside_TE).sum() / max(len(probs_TE), 1)


def limits(gate: GateSpec, experts: int) -> str | None:
    """Every group must hold K experts."""
    groups = gate_options.read(Options, gate).groups
    if experts // groups < gate.top_k:
        return (
            f"gate sam picks top_k = {gate.top_k} experts inside one of groups = {groups}, "
            f"and with experts = {experts} a group has {experts // groups}"
        )
    return None


def exact(gate: GateSpec, tokens: int, experts: int, start: int) -> Tensor:
    """Balanced choices [T, K] where G divides E and E divides T: groups in turn, and inside them experts in turn."""
    groups = gate_options.read(Options, gate).groups
    turn_T = torch.arange(tokens) + start
    group_T = turn_T % groups
    first_G = torch.searchsorted(groups_of(experts, groups), torch.arange(groups + 1))
    size_T = (first_G[1:] - first_G[:-1])[group_T]
    inside_TK = (turn_T // groups)[:, None] + torch.arange(gate.top_k)
    return first_G[group_T][:, None] + inside_TK % size_T[:, None]


SAM = Gate(
    name="sam",
    title="SAM",
    formula="the group of experts with the largest sum of p; the K largest p inside it",
    default_top_k=2,
    choose=choose,
    source="Jiang et al. 2021 (arXiv 2110.07431); Hsword/Hetu 722ba6a, SAMGate.py",
    aux="E/K sum P_e f_e, plus the mean over tokens of sum over e outside of max(0, p_e - p_K)",
    conventions={"noise": ("none",)},
    options=Options,
    limits=limits,
    exact=exact,
)
