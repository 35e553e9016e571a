"""What the layers share: router, experts, exchange of expert buffers, weights in the common layout.

T tokens of a rank, E experts, L = E / R experts of a rank, R ranks, C slots of each (source rank, expert), D model,
F feed-forward, K choices a token.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.exchanges import exchange as exchange_rows
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.expert_ffn import expert_ffn
from moebench.kernels.host import read_ints
from moebench.kernels.region import region
from moebench.systems.interface import LayerWeights, MoELayer, System, problem
from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.errors import InputError
from moebench.workloads.gates import registry as gates
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.noise import jitter
from moebench.workloads.layer import LayerWorkload
from moebench.workloads.token_ids import token_ids_for


class Router(nn.Module):
    """The linear router in `gate_dtype`: input and weight are cast at every call, as the real layers do.

    Its buffers are the rule's state (`Gate.state`). A rule without a router has no parameter here.
    """

    def __init__(self, workload: LayerWorkload, conventions: Conventions, device: torch.device, dtype: torch.dtype):
        super().__init__()
        rule, self.experts = gates.get_gate(workload.gate.name), workload.experts
        self.weight_ED: nn.Parameter | None = None
        if rule.has_router:
            weight_ED = _normal(workload.experts, workload.d_model, device=device, dtype=dtype)
            self.weight_ED = nn.Parameter(weight_ED)
        self.gate_dtype = torch_dtype(conventions.gate_dtype)
        self.jitters = conventions.noise == "input-jitter"
        for name, tensor in rule.initial_state(workload.gate, workload.experts).items():
            self.register_buffer(name, tensor.to(device))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Logits [T, E]; zeros that take no memory where there is no router."""
        if self.weight_ED is None:
            return x_TD.new_zeros((), dtype=self.gate_dtype).expand(len(x_TD), self.experts)
        x_TD = x_TD.to(self.gate_dtype)
        if self.jitters and self.training:
            x_TD = jitter(x_TD)
        return torch.mm(x_TD, self.weight_ED.to(self.gate_dtype).t())


class Expert(nn.Module):
    """One expert: two bias-free products around an activation, or three for SwiGLU; any leading dimensions."""

    def __init__(self, workload: LayerWorkload, device: torch.device, dtype: torch.dtype):
        super().__init__()
        d_model, d_ffn = workload.d_model, workload.d_ffn
        self.activation = workload.activation
        self.w1_DF = nn.Parameter(_normal(d_model, d_ffn, device=device, dtype=dtype))
        self.w2_FD = nn.Parameter(_normal(d_ffn, d_model, device=device, dtype=dtype))
        self.w3_DF: nn.Parameter | None = None
        if workload.activation == "swiglu":
            self.w3_DF = nn.Parameter(_normal(d_model, d_ffn, device=device, dtype=dtype))
        for parameter in self.parameters():
            parameter.is_expert = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """The rows of x through the expert; a copy where they are not evenly strided."""
        x_ND = x.reshape(-1, x.shape[-1])
        return expert_ffn(x_ND, self.w1_DF, self.w2_FD, self.w3_DF, self.activation).view(x.shape)


class ExpertParallelLayer(MoELayer):
    """A router and the L experts of this rank, each its own module.

    Attributes:
        step: training steps taken, for rules that follow a schedule.
        counts_E: what `note_counts` was told in this step.
        token_ids_T: the ids of the tokens of the next call, for rules that route by them; at first those of the
            workload (`token_ids_for`). None for all other rules.
    """

    step: int = 0
    counts_E: Tensor | None = None
    token_ids_T: Tensor | None

    def __init__(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        self.workload, self.group, self.conventions = workload, group, conventions
        self.gate = self.make_router(device, dtype)
        self.register_buffer("token_ids_T", _token_ids(workload, group, device), persistent=False)
        self.experts: Any = self.make_experts(device, dtype)  # most often a ModuleList

    def make_router(self, device: torch.device, dtype: torch.dtype) -> Router:
        """The router of this layer."""
        return Router(self.workload, self.conventions, device, dtype)

    def make_experts(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The experts of this rank; a layer that makes others has its own ways to load weights and give gradients."""
        local = self.workload.experts // self.group.size
        return nn.ModuleList(Expert(self.workload, device, dtype) for _ in range(local))

    @property
    def local_experts(self) -> list[Expert]:
        """The experts of this rank, in order."""
        return cast(list[Expert], list(self.experts))

    @property
    def gate_context(self) -> GateContext:
        """What the rule is given besides logits."""
        return GateContext(self.training, self.step, self.token_ids_T, dict(self.gate.named_buffers()))

    def note_counts(self, counts_E: Tensor) -> None:
        """Where the rule's state follows the load (`Gate.update`), every training step's forward must say it.

        Args:
            counts_E: int64 routes of this rank to each expert, before capacity.
        """
        if self.training and gates.get_gate(self.workload.gate.name).update is not None:
            self.counts_E = counts_E

    def advance(self, stands_still: bool = False) -> None:
        """After a training step's backward: one step more, and the rule's state by the load over all ranks.

        The state takes an all-reduce of E numbers and is the same on every rank. In evaluation nothing changes.

        Args:
            stands_still: do the work, but leave state and step as they were.

        Raises:
            RuntimeError: the forward noted no counts, and the state follows them.
        """
        if not self.training:
            return
        update = gates.get_gate(self.workload.gate.name).update
        if update is not None:
            if self.counts_E is None:
                raise RuntimeError(f"gate {self.workload.gate.name}: the layer's forward did not note its counts")
            with region("gate"), torch.no_grad():
                counts_E, self.counts_E = all_reduce(self.counts_E, self.group), None
                state = dict(self.gate.named_buffers())
                for name, new in update(state, counts_E, self.workload.gate).items():
                    (torch.empty_like(new) if stands_still else state[name]).copy_(new)
        self.step += not stands_still

    def load_weights(self, weights: LayerWeights) -> None:
        """Copy `weights` into this layer's parameters."""
        with torch.no_grad():
            if self.gate.weight_ED is not None:
                self.gate.weight_ED.copy_(weights.gate_DE.t())
            for name, stacked in _expert_weights(weights):
                for expert, weight in zip(self.experts, stacked, strict=True):
                    getattr(expert, name).copy_(weight)

    def weight_gradients(self) -> LayerWeights:
        """The gradients of this layer's parameters, in the common layout; zeros where autograd left None."""
        def stacked(name: str) -> Tensor:
            return torch.stack([grad_of(getattr(expert, name)) for expert in self.experts])

        w1_LDF, w3_LDF = stacked("w1_DF"), stacked("w3_DF") if self.workload.activation == "swiglu" else None
        return LayerWeights(self.router_gradient(w1_LDF), w1_LDF, stacked("w2_FD"), w3_LDF)

    def router_gradient(self, like: Tensor) -> Tensor:
        """Of the router [D, E]; zeros, in dtype and on the device of `like`, where there is none."""
        router_ED = self.gate.weight_ED
        if router_ED is None:
            return like.new_zeros(self.workload.d_model, self.workload.experts)
        return grad_of(router_ED).t().contiguous()


def refusal(
    workload: LayerWorkload,
    conventions: Conventions,
    system: str,
    known_gates: Sequence[str] | None = None,
    **supported: Sequence[str],
) -> str | None:
    """Why a system that knows only the `supported` values of the named fields can't run these conventions.

    Covers what holds for every system: an unknown gate, or conventions or a number of experts without a meaning for it.

    Args:
        known_gates: names of the gates that the system has; None for all.
    """
    try:
        rule = gates.get_gate(workload.gate.name)
    except InputError as error:
        return str(error)
    if known_gates is not None and rule.name not in known_gates:
        return f"{system} has no gate {rule.name}; it has {', '.join(known_gates)}"
    reason = rule.problem(workload.gate, conventions, workload.experts)
    if reason is not None:
        return reason
    for field, known in supported.items():
        value = getattr(conventions, field)
        if value not in known:
            return f"{system} runs gate {workload.gate.label} with {field} {' or '.join(known)}, not {value}"
    return None


def checked(system: System, workload: LayerWorkload, group: Group, conventions: Conventions) -> None:
    """Refuse to build a layer that has no meaning or no implementation.

    Raises:
        InputError: the reason.
    """
    reason = problem(system, workload, conventions, group.size)
    if reason is not None:
        raise InputError(reason)


def exchange(x_ECD: Tensor, group: Group, by: str = "flat") -> Tensor:
    """Even all-to-all of expert buffers: to [R, L, C, D] by source rank, and back to [E, C, D]; alone, x itself.

    Args:
        by: one of `moebench.kernels.collectives.exchanges.EXCHANGES`.

    Raises:
        ValueError: another name, or a hierarchical exchange on nodes that are unknown or unequal.
    """
    with region("exchange"):
        return exchange_rows(x_ECD.contiguous(), group, by)


def largest_count(counts_E: Tensor, group: Group) -> int:
    """The largest count over experts and ranks, which the host must read."""
    most = torch.max(counts_E)
    if group.size > 1:
        # Packages' all-reduce takes the maximum; the shared one adds, so each rank adds its own entry.
        most_R = most.new_zeros(group.size)
        most_R[group.index] = most
        most = torch.max(all_reduce(most_R, group))
    return read_ints(most, "max_expert_count")[0]


def mean_over_tokens(x_TE: Tensor) -> Tensor:
    """Mean of each column; 0 without tokens, where torch's mean is NaN."""
    return x_TE.mean(dim=0) if len(x_TE) else x_TE.sum(dim=0)


def _token_ids(workload: LayerWorkload, group: Group, device: torch.device) -> Tensor | None:
    """The workload's, for rules that route by them."""
    if not gates.get_gate(workload.gate.name).needs_token_ids:
        return None
    if device.type == "meta":
        return torch.empty(workload.tokens, dtype=torch.int64, device=device)
    return token_ids_for(workload, group.rank).to(device)


def _normal(rows: int, columns: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random weights that keep the variance of what they multiply; of meta tensors, which take long to fill, none."""
    weights = torch.empty(rows, columns, device=device, dtype=dtype)
    return weights if weights.is_meta else weights.normal_(std=rows**-0.5)


def grad_of(parameter: Tensor) -> Tensor:
    """A parameter's gradient; zeros where autograd left None."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()


def _expert_weights(weights: LayerWeights) -> list[tuple[str, Tensor]]:
    pairs = (("w1_DF", weights.w1_LDF), ("w2_FD", weights.w2_LFD), ("w3_DF", weights.w3_LDF))
    return [(name, stacked) for name, stacked in pairs if stacked is not None]
