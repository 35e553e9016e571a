"""Hash layers: a fixed table says which expert a token id goes to; no router, no loss (Roller et al. 2021).

`map` random gives every id an expert at random; balanced deals the ids out by falling frequency, each to the expert
with the least load so far. Frequencies follow Zipf's law with exponent `token_alpha`; with 0, the default, every id is
as frequent as any other, which is what Hetu's demonstration feeds.

V ids of the vocabulary, T tokens, E experts.
"""

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates.context import Choice, GateContext
from moebench.workloads.gates.gate import Gate
from moebench.workloads.layer import GateSpec

MAPS = ("random", "balanced")
STATE = "expert_of_V"  # the table, int64 [V]
MOST_IDS = 2**22


@dataclass(frozen=True)
class Options:
    """What the rule leaves open.

    Attributes:
        map: `random` or `balanced`.
        vocabulary: number of token ids V.
        token_alpha: id r has a frequency proportional to (r + 1)^-token_alpha.
        seed: of the random table.
    """

    map: str = "random"
    vocabulary: int = 32768
    token_alpha: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.map not in MAPS:
            raise one_of("map", self.map, MAPS)
        gate_options.at_least("vocabulary", self.vocabulary, 1)
        gate_options.at_least("token_alpha", self.token_alpha, 0)
        gate_options.at_least("seed", self.seed, 0)
        if self.vocabulary > MOST_IDS:
            raise InputError(f"vocabulary = {self.vocabulary}: must be at most {MOST_IDS}")


def choose(
    logits_TE: Tensor,
    gate: GateSpec,
    conventions: Conventions,
    context: GateContext,
    generator: torch.Generator | None,
) -> Choice:
    """The rule `hash`, K = 1: a `moebench.workloads.gates.context.Rule`. Of the logits only shape and dtype count."""
    assert context.token_ids_T is not None  # `Gate.route` has checked
    experts_T1 = context.state[STATE].index_select(0, context.token_ids_T).unsqueeze(1)
    weights_T1 = logits_TE.new_ones(experts_T1.shape)
    probs_TE = logits_TE.new_zeros(logits_TE.shape).scatter(1, experts_T1, weights_T1)
    return Choice(experts_T1, weights_T1, probs_TE)


def state(gate: GateSpec, experts: int) -> dict[str, Tensor]:
    """The table of a gate."""
    return {STATE: _table(gate_options.read(Options, gate), experts).clone()}


@lru_cache(maxsize=8)
def _table(options: Options, experts: int) -> Tensor:
    if options.map == "balanced":
        return balanced_map(frequencies(options), experts)
    return torch.randint(experts, (options.vocabulary,), generator=torch.Generator().manual_seed(options.seed))


def frequencies(options: Options) -> Tensor:
    """How often each id occurs, float64 [V], summing to 1."""
    share_V = torch.arange(1, options.vocabulary + 1, dtype=torch.float64) ** -options.token_alpha
    return share_V / share_V.sum()


def balanced_map(frequency_V: Tensor, experts: int) -> Tensor:
    """The expert of every id, int64 [V]: ids by falling frequency, each to the expert with the least load so far.

    Ties go to the lowest id and the lowest expert. The most and the least loaded expert differ by at most the frequency
    of the last id that the most loaded one got.

    Args:
        frequency_V: how often each id occurs: counts or shares, not negative.
    """
    order_V = torch.argsort(frequency_V, descending=True, stable=True).tolist()
    share = frequency_V.tolist()
    loads = [(0, expert) for expert in range(experts)]  # a heap already
    expert_of_V = [0] * len(order_V)
    for token_id in order_V:
        load, expert = loads[0]
        expert_of_V[token_id] = expert
        heapq.heapreplace(loads, (load + share[token_id], expert))
    return torch.tensor(expert_of_V, dtype=torch.int64)


HASH = Gate(
    name="hash",
    title="Hash",
    formula="table[token id]",
    weight="1",
    default_top_k=1,
    choose=choose,
    source="Roller et al. 2021 (arXiv 2106.04426), section 3; Hsword/Hetu 722ba6a, HashGate.py",
    aux="none",
    conventions={"noise": ("none",), "normalisation": ("none",), "drop_order": ("arrival", "random")},
    options=Options,
    needs_token_ids=True,
    has_router=False,
    state=state,
)
