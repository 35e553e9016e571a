"""The small layer on which a system must be right before its numbers count, and what its ranks do with it.

The data reach what goes wrong in practice: more tokens for expert 0 than it has slots, an expert that nobody wants,
uneven numbers of tokens where the exchange allows them, strided inputs and gradients, fresh memory full of NaN, and a
second step after an optimiser step. Logits are well apart, so that rounding never decides where a token goes.

T tokens of a rank, E experts, L of a rank, D model, F feed-forward.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.systems.interface import LayerWeights, MoELayer, System
from moebench.systems.registry import get
from moebench.systems.training import TrainingStep
from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.gates import hash as hash_gate
from moebench.workloads.gates import registry as gates
from moebench.workloads.gates.context import GateContext
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.token_ids import ids_of_experts

STEPS = 2
TOKENS = 24
FEWEST_EXPERTS = 4
MOST_LOCAL_EXPERTS = 64
EXTRA = 5  # input columns beyond the logits; the last is 1 in a probe
_SPACING = 0.4  # between the logits of a token
_POPULAR = 0.4  # share of the tokens that are sent to expert 0


@dataclass(frozen=True)
class Instance:
    """One check: a layer on some ranks.

    Attributes:
        tokens: of each rank.
        learning_rate: 0 where rounded weights could differ from the reference's by more than rounding errors.
        is_probe: experts give back their own name, so that the output is the combine weight of every expert.
        training: False for the layer in evaluation; gradients are taken all the same.
    """

    workload: LayerWorkload
    conventions: Conventions
    tokens: tuple[int, ...]
    learning_rate: float
    is_probe: bool = False
    training: bool = True

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.tokens)


@dataclass(frozen=True)
class Data:
    """Inputs, upstream gradients and gate contexts of every rank, and the weights of all experts."""

    xs: tuple[Tensor, ...]
    upstreams: tuple[Tensor, ...]
    weights: LayerWeights
    contexts: tuple[GateContext, ...]


@dataclass(frozen=True)
class Observed:
    """What one rank saw in one step, in float64.

    Attributes:
        state: what the rule has changed of its own after the step, by name; empty for most rules.
    """

    y_TD: Tensor
    aux: Tensor
    x_gradient_TD: Tensor
    gradients: LayerWeights
    state: Mapping[str, Tensor] = field(default_factory=dict)


def instance(
    gate: GateSpec,
    dtype: str,
    conventions: Conventions,
    ranks: int,
    activation: str = "relu",
    *,
    is_probe: bool = False,
    training: bool = True,
    experts: int | None = None,
) -> Instance:
    """At least two experts a rank, one more than a token may choose, so that one can stay empty, what the gate takes.

    Args:
        experts: another number.

    Raises:
        InputError: unknown gate.
    """
    rule = gates.get_gate(gate.name)
    fewest = ranks * max(2, -(-max(gate.top_k + 1, FEWEST_EXPERTS) // ranks))
    choices = range(fewest, fewest + MOST_LOCAL_EXPERTS * ranks, ranks)
    # Where none will do, the system's own `supports` says why.
    experts = experts or next((number for number in choices if rule.size_problem(gate, number) is None), fewest)
    workload = LayerWorkload(
        gate, batch_size=1, sequence=TOKENS, d_model=experts + EXTRA, d_ffn=12, experts=experts, dtype=dtype,
        activation=activation,
    )  # fmt: skip
    # A step in a coarse dtype moves weights by rounding errors that the reference does not make.
    learning_rate = 1e-3 if dtype in ("fp64", "fp32") and not is_probe else 0.0
    tokens = uneven_tokens(workload, conventions, ranks)
    return Instance(workload, conventions, tokens, learning_rate, is_probe, training)


def uneven_tokens(workload: LayerWorkload, conventions: Conventions, ranks: int) -> tuple[int, ...]:
    """Tokens of each rank: any where capacity is shared, an empty rank too; else those with TOKENS's capacity."""
    fixes_capacity = gates.get_gate(workload.gate.name).fixes_capacity
    if fixes_capacity:
        return (TOKENS,) * ranks
    if conventions.is_dropless:
        return tuple((TOKENS, 7, 0, TOKENS + 3)[rank % 4] for rank in range(ranks))

    def capacity(tokens: int) -> int:
        return conventions.capacity(tokens, workload.experts, workload.gate.top_k, workload.capacity_factor)

    same = [tokens for tokens in range(TOKENS, 0, -1) if capacity(tokens) == capacity(TOKENS)]
    return tuple(same[min(rank * (len(same) - 1) // max(ranks - 1, 1), len(same) - 1)] for rank in range(ranks))


def data(instance: Instance) -> Data:
    """The same on every rank and in the process that judges; values of the instance's dtype, kept in float64."""
    workload = instance.workload
    random = torch.Generator().manual_seed(7)
    dtype = torch_dtype(workload.dtype)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    xs = tuple(rounded(_tokens(instance, count, random)) for count in instance.tokens)
    contexts = tuple(GateContext(instance.training, token_ids_T=_token_ids(workload, x_TD)) for x_TD in xs)
    upstreams = tuple(rounded(normal(*x.shape) / instance.ranks) for x in xs)
    experts, d_model, d_ffn = workload.experts, workload.d_model, workload.d_ffn
    router_DE = torch.cat([torch.eye(experts, dtype=torch.float64), 0.01 * normal(d_model - experts, experts)])
    if instance.is_probe:
        router_DE[experts:] = 0
        return Data(xs, upstreams, _probe_weights(workload, router_DE), contexts)
    w1_EDF = rounded(normal(experts, d_model, d_ffn) * d_model**-0.5)
    w2_EFD = rounded(normal(experts, d_ffn, d_model) * d_ffn**-0.5)
    w3_EDF = rounded(normal(experts, d_model, d_ffn) * d_model**-0.5) if workload.activation == "swiglu" else None
    return Data(xs, upstreams, LayerWeights(rounded(router_DE), w1_EDF, w2_EFD, w3_EDF), contexts)


def _tokens(instance: Instance, count: int, random: torch.Generator) -> Tensor:
    """Logits in the first E columns: evenly spaced values in an order of each token's own, times its own scale."""
    experts = instance.workload.experts
    orders_TE = torch.rand(count, experts - 1, generator=random).argsort(dim=1)
    logits_TE = torch.full((count, experts), -8.0, dtype=torch.float64)  # the last expert stays empty
    logits_TE[:, :-1] = orders_TE * _SPACING
    popular_T = torch.rand(count, generator=random) < _POPULAR
    if experts > 1:
        best_T1 = logits_TE[:, :-1].argmax(dim=1, keepdim=True)
        swapped_TE = logits_TE.scatter(1, best_T1, logits_TE[:, :1])
        swapped_TE[:, :1] = logits_TE.gather(1, best_T1)
        logits_TE = torch.where(popular_T[:, None], swapped_TE, logits_TE)
    scale_T1 = 1 + 0.5 * torch.randperm(count, generator=random, dtype=torch.float64)[:, None] / max(count, 1)
    rest = torch.randn(count, EXTRA, generator=random, dtype=torch.float64)
    if instance.is_probe:
        rest[:, -1] = 1
    return torch.cat([logits_TE * scale_T1, rest], dim=1)


def _token_ids(workload: LayerWorkload, x_TD: Tensor) -> Tensor | None:
    """Ids that lead to the expert with the largest logit, for rules that route by them."""
    rule = gates.get_gate(workload.gate.name)
    if not rule.needs_token_ids:
        return None
    expert_of_V = rule.initial_state(workload.gate, workload.experts)[hash_gate.STATE]
    wanted_T = x_TD[:, : workload.experts].argmax(dim=1)
    return ids_of_experts(wanted_T, expert_of_V, workload.experts, torch.Generator().manual_seed(len(x_TD)))


def _probe_weights(workload: LayerWorkload, router_DE: Tensor) -> LayerWeights:
    """Expert e answers every token with the unit vector e: its one hidden unit sees the constant column."""
    experts, d_model, d_ffn = workload.experts, workload.d_model, workload.d_ffn
    w1_EDF = torch.zeros(experts, d_model, d_ffn, dtype=torch.float64)
    w1_EDF[:, -1, 0] = 1
    one = torch.ones((), dtype=torch.float64)
    act = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "swiglu": torch.nn.functional.silu}
    w2_EFD = torch.zeros(experts, d_ffn, d_model, dtype=torch.float64)
    w2_EFD[range(experts), 0, range(experts)] = 1 / act[workload.activation](one)
    return LayerWeights(router_DE, w1_EDF, w2_EFD, w1_EDF.clone() if workload.activation == "swiglu" else None)


def run_rank(group: Group, system_name: str, instances: tuple[Instance, ...]) -> list[list[Observed]]:
    """What this rank observes: per instance, per step."""
    system = get(system_name)
    return [observe(system, instance, group) for instance in instances]


def run_trials(group: Group, trials: Sequence[tuple[str, tuple[Instance, ...]]]) -> list[list[list[Observed]]]:
    """`run_rank` for several systems, one after another: the ranks start once."""
    return [run_rank(group, name, instances) for name, instances in trials]


def observe(system: System, instance: Instance, group: Group) -> list[Observed]:
    """The steps of one instance on one rank."""
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Fills fresh memory with NaN, so that whoever reads what nobody wrote is found out.
        torch.set_deterministic_debug_mode("warn")
        try:
            return _steps(system, instance, group)
        finally:
            torch.set_deterministic_debug_mode(before)


def _steps(system: System, instance: Instance, group: Group) -> list[Observed]:
    dtype, everything = torch_dtype(instance.workload.dtype), data(instance)
    layer = system.build(instance.workload, group, instance.conventions, torch.device("cpu"), dtype)
    layer.load_weights(local_weights(everything.weights, group.index, group.size, dtype))
    layer.train(instance.training)
    layer.tokens_of_ranks = instance.tokens
    token_ids_T = everything.contexts[group.index].token_ids_T
    if token_ids_T is not None:
        layer.token_ids_T = token_ids_T
    # A probe is judged by a rule that has not moved.
    step = TrainingStep(layer, group, learning_rate=instance.learning_rate, stands_still=instance.is_probe)
    torch.manual_seed(group.index)
    seen = []
    for _ in range(STEPS):
        x_TD = _strided(everything.xs[group.index].to(dtype)).requires_grad_(instance.workload.input_gradient)
        y_TD, aux = step(x_TD, _strided(everything.upstreams[group.index].to(dtype)))
        gradient_TD = torch.zeros_like(x_TD) if x_TD.grad is None else x_TD.grad
        own = map_weights(_plain, layer.weight_gradients())
        seen.append(Observed(_plain(y_TD), _plain(aux), _plain(gradient_TD), own, _state(instance, layer)))
    return seen


def _state(instance: Instance, layer: MoELayer) -> dict[str, Tensor]:
    rule = gates.get_gate(instance.workload.gate.name)
    if rule.update is None or not isinstance(layer.gate, torch.nn.Module):
        return {}
    return {name: _plain(x) for name, x in layer.gate.named_buffers()}


def local_weights(weights: LayerWeights, rank: int, ranks: int, dtype: torch.dtype) -> LayerWeights:
    """The router and the experts that a rank holds, or its columns of the one that it shares with other ranks."""
    experts, _, d_ffn = weights.w1_LDF.shape
    sharers, held = max(1, ranks // experts), max(1, experts // ranks)
    own = slice(rank // sharers * held, rank // sharers * held + held)
    width = d_ffn // sharers
    columns = slice(rank % sharers * width, rank % sharers * width + width)
    return LayerWeights(
        gate_DE=weights.gate_DE.to(dtype),
        w1_LDF=weights.w1_LDF[own, :, columns].to(dtype),
        w2_LFD=weights.w2_LFD[own, columns].to(dtype),
        w3_LDF=None if weights.w3_LDF is None else weights.w3_LDF[own, :, columns].to(dtype),
    )


def _strided(x_TD: Tensor) -> Tensor:
    """The same values, rows further apart than they are long."""
    return torch.cat([x_TD, torch.full_like(x_TD, float("nan"))], dim=1)[:, : x_TD.shape[1]]


def _plain(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64).contiguous().clone()


def map_weights(function: Callable[..., Tensor], *weights: LayerWeights) -> LayerWeights:
    """`function` of each weight, or of corresponding weights."""

    def of(name: str) -> Tensor:
        return function(*(getattr(one, name) for one in weights))

    w3_LDF = None if weights[0].w3_LDF is None else of("w3_LDF")
    return LayerWeights(of("gate_DE"), of("w1_LDF"), of("w2_LFD"), w3_LDF)
