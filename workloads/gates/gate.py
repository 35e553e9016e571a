"""A routing rule with all that is known about it, and the way from logits to a Routing that all rules share.

T tokens of a rank, E experts, K choices a token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.errors import InputError
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates import steps
from moebench.workloads.gates.context import TRAINING, Choice, GateContext, Rule
from moebench.workloads.layer import FIXED_TOP_K, GateSpec
from moebench.workloads.routing import Routing

QUIET_OR_JITTER = ("none", "input-jitter")  # noises that any rule with a linear router takes


@dataclass(frozen=True)
class Gate:
    """A routing rule with its reference implementation.

    Attributes:
        formula: who is chosen, in one line, p = softmax(logits).
        weight: the combine weight w of a choice, before the conventions normalise it.
        default_top_k: K where a suite does not say.
        choose: the rule.
        source: where it was published.
        aux: its auxiliary losses in one line, as `auxiliary` = 1 has them.
        capacity: what decides the slots: most often the conventions' rule.
        conventions: for each field of Conventions that does not take all its values here, those that have a meaning.
        options: frozen dataclass of the rule's options, all with defaults; raises InputError for a bad value.
        needs_token_ids: whether it routes by `GateContext.token_ids_T`.
        has_router: whether there are router parameters; without, the logits' values are not read.
        state: tensors that live in the layer beside the parameters, from (gate, experts); None without.
        update: the state after a training step, from (state, counts_E over all ranks, gate); None where it stays.
        limits: why the rule has no meaning with so many experts, from (gate, experts); None when it has one.
        exact: balanced choices [T, K], from (gate, tokens, experts, where to start); None for those of `topk`.
        evaluation: what it does otherwise in evaluation; empty where it only leaves noise out.
        even: routes that every expert gets, from (gate, tokens, experts), where the rule itself makes them equal in
            training and keeps them all; None where it does not.
        fixes_capacity: whether it may fix the slots itself, from the number of tokens (`Choice.capacity`).
    """

    name: str
    title: str
    formula: str
    default_top_k: int
    choose: Rule
    source: str
    aux: str
    weight: str = "p_e"
    capacity: str = "the rule"
    conventions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: type = gate_options.NoOptions
    needs_token_ids: bool = False
    has_router: bool = True
    state: Callable[[GateSpec, int], dict[str, Tensor]] | None = None
    update: Callable[[Mapping[str, Tensor], Tensor, GateSpec], dict[str, Tensor]] | None = None
    limits: Callable[[GateSpec, int], str | None] | None = None
    exact: Callable[[GateSpec, int, int, int], Tensor] | None = None
    evaluation: str = ""
    even: Callable[[GateSpec, int, int], int | None] | None = None
    fixes_capacity: bool = False

    def route(
        self,
        logits_TE: Tensor,
        gate: GateSpec,
        conventions: Conventions,
        capacity_factor: float,
        generator: torch.Generator | None = None,
        max_count: steps.MaxCount = None,
        context: GateContext = TRAINING,
    ) -> Routing:
        """Where the tokens of one rank go. Logits are those of `steps.router_logits`.

        Args:
            logits_TE: of any floating-point dtype; they are cast to `gate_dtype`.
            generator: feeds noise and random drops.
            max_count: a dropless layer's capacity.

        Raises:
            InputError: conventions, options or sizes without a meaning for this rule; no token ids where it needs them.
        """
        choice = self._chosen(logits_TE, gate, conventions, generator, context)
        return steps.settle(choice, conventions, capacity_factor, generator, max_count)

    def loads(
        self,
        logits_TE: Tensor,
        gate: GateSpec,
        conventions: Conventions,
        capacity_factor: float,
        generator: torch.Generator | None = None,
        context: GateContext = TRAINING,
    ) -> tuple[Tensor, Tensor, int | None]:
        """What `route` would say of `counts_E`, of the routes to each expert that are kept, int64 [E], and of rounds.

        Several times faster. Without capacity this rank's largest count is nobody's limit.

        Raises:
            InputError: as `route`.
        """
        choice = self._chosen(logits_TE, gate, conventions, generator, context)
        return *steps.loads(choice, conventions, capacity_factor), choice.rounds

    def _chosen(
        self,
        logits_TE: Tensor,
        gate: GateSpec,
        conventions: Conventions,
        generator: torch.Generator | None,
        context: GateContext,
    ) -> Choice:
        """The rule's choices, once everything it needs is there."""
        tokens, experts = logits_TE.shape
        reason = self.problem(gate, conventions, experts) or self.context_problem(context, tokens)
        if reason is not None:
            raise InputError(reason)
        if self.state is not None and not context.state:
            initial = self.state(gate, experts)
            context = replace(context, state={name: x.to(logits_TE.device) for name, x in initial.items()})
        logits_TE = logits_TE.to(torch_dtype(conventions.gate_dtype))
        return self.choose(logits_TE, gate, conventions, context, generator)

    def initial_state(self, gate: GateSpec, experts: int) -> dict[str, Tensor]:
        """The tensors of a fresh layer with E = `experts`, by name, on the CPU."""
        return {} if self.state is None else self.state(gate, experts)

    def problem(self, gate: GateSpec, conventions: Conventions, experts: int | None = None) -> str | None:
        """Why the gate has no meaning under these conventions, or with E = `experts`; None when it has one."""
        try:
            gate_options.read(self.options, gate)
        except InputError as error:
            return str(error)
        return self._conventions_problem(gate, conventions) or (experts and self.size_problem(gate, experts)) or None

    def _conventions_problem(self, gate: GateSpec, conventions: Conventions) -> str | None:
        fixed = FIXED_TOP_K.get(self.name)
        if fixed is not None and gate.top_k != fixed:
            return f"gate {self.name} makes {fixed} choice(s) a token, not top_k = {gate.top_k}; gate topk takes any"
        for name, known in {"noise": QUIET_OR_JITTER, **self.conventions}.items():
            value = getattr(conventions, name)
            if value not in known:
                return f"{name} {value} has no meaning for gate {self.name}; it takes {', '.join(known)}"
        if conventions.noise == "random-second" and conventions.normalisation == "after-drop":
            return "noise random-second draws with the second weight, which normalisation after-drop knows only later"
        if conventions.is_dropless and conventions.drop_order != "arrival":
            order = conventions.drop_order
            return f"drop_order {order} has no meaning under capacity_rule unlimited: nothing is dropped"
        return None

    def size_problem(self, gate: GateSpec, experts: int) -> str | None:
        """Why the gate has no meaning with E = `experts`; None when it has one.

        Raises:
            InputError: options that the rule refuses.
        """
        if gate.top_k > experts:
            return f"top_k = {gate.top_k} is above experts = {experts}"
        return None if self.limits is None else self.limits(gate, experts)

    def context_problem(self, context: GateContext, tokens: int) -> str | None:
        """What the rule needs and a context lacks; None when it has it."""
        if not self.needs_token_ids:
            return None
        ids_T = context.token_ids_T
        if ids_T is None:
            return f"gate {self.name} routes by token id, and there are no token ids"
        if ids_T.shape != (tokens,) or ids_T.dtype != torch.int64:
            return f"token ids must be int64 [{tokens}], one a token; got {ids_T.dtype} {list(ids_T.shape)}"
        return None
