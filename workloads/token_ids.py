"""The token ids of a workload, for rules that route by them. Apart from moebench.workloads.routing, which rules import.

T tokens of a rank, V ids of the vocabulary, E experts.
"""

import torch
from torch import Tensor

from moebench.kernels.explicit import count
from moebench.workloads.errors import InputError
from moebench.workloads.gates import hash as hash_gate
from moebench.workloads.gates import options as gate_options
from moebench.workloads.layer import LayerWorkload
from moebench.workloads.routing import TOKEN_IDS, generator_for, logits_for


def token_ids_for(workload: LayerWorkload, rank: int) -> Tensor:
    """The ids [T] that `rank` feeds to a `hash` gate, int64, the same on every machine, drawn from the workload's seed.

    `iid`: independent draws with the frequencies of the gate's options. Every other kind of routing says which experts
    are wanted, so a token's id is any of those that the table sends to the expert with the token's largest imposed
    logit (`logits_for`); `exact` and `zipf` so mean for `hash` what they mean for other rules.

    Raises:
        InputError: another gate; an expert is wanted that no id leads to.
    """
    if workload.gate.name != "hash":
        raise InputError(f"gate {workload.gate.name} does not route by token id")
    options = gate_options.read(hash_gate.Options, workload.gate)
    random = generator_for(workload, rank, TOKEN_IDS)
    if workload.routing.kind == "iid":
        frequency_V = hash_gate.frequencies(options)
        if workload.tokens == 0:
            return torch.empty(0, dtype=torch.int64)
        return torch.multinomial(frequency_V, workload.tokens, replacement=True, generator=random)
    expert_of_V = hash_gate.state(workload.gate, workload.experts)[hash_gate.STATE]
    return ids_of_experts(logits_for(workload, rank).argmax(dim=1), expert_of_V, workload.experts, random)


def ids_of_experts(experts_T: Tensor, expert_of_V: Tensor, experts: int, random: torch.Generator) -> Tensor:
    """For each token one of the ids that lead to its expert, any of them equally likely, int64 [T].

    Raises:
        InputError: no id leads to a wanted expert.
    """
    ids_E, wanted_E = count(expert_of_V, experts), count(experts_T, experts)
    without = [e for e, (ids, wanted) in enumerate(zip(ids_E.tolist(), wanted_E.tolist())) if wanted and not ids]
    if without:
        raise InputError(f"expert {without[0]} is wanted and none of the {len(expert_of_V)} token ids leads to it")
    by_expert_V, first_E = torch.argsort(expert_of_V, stable=True), ids_E.cumsum(0) - ids_E
    draw_T = torch.rand(len(experts_T), dtype=torch.float64, generator=random)
    return by_expert_V[first_E[experts_T] + (draw_T * ids_E[experts_T]).long()]
