"""The steps that the routing rules share: logits, ranked choices, slots and drops, weights, auxiliary loss.

Plain differentiable torch, written to be read: this is the definition that every system's own gate is held to.
T tokens of a rank, E experts, K choices a token, N = T*K routes, C slots per (source rank, expert), D model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from moebench.kernels.explicit import count
from moebench.workloads.conventions import Conventions
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.gates.context import Choice
from moebench.workloads.gates.noise import jitter
from moebench.workloads.routing import Routing

NO_ROUTE = -1
FEW_CHOICES = 4
# Capacity of a dropless layer: the largest count over all experts and ranks, or a function that finds it from this
# rank's counts. None stands for this rank alone.
MaxCount = int | Callable[[Tensor], int] | None

_choices_alone: ContextVar[bool] = ContextVar("choices_alone", default=False)


def router_logits(
    x_TD: Tensor,
    gate_DE: Tensor,
    conventions: Conventions,
    generator: torch.Generator | None = None,
    training: bool = True,
) -> Tensor:
    """The linear router in `gate_dtype`; in training `input-jitter` acts here, on the gate's input alone."""
    dtype = torch_dtype(conventions.gate_dtype)
    x_TD = x_TD.to(dtype)
    if training and conventions.noise == "input-jitter":
        x_TD = jitter(x_TD, generator)
    return x_TD @ gate_DE.to(dtype)


def ranked(values_TE: Tensor, top_k: int) -> Tensor:
    """The experts of the K largest values, best first, ties to the lowest expert id.

    A few are found one after another, which is several times faster than the sort that defines all of them; -inf is
    then the same as the lowest finite number.
    """
    if top_k > FEW_CHOICES or values_TE.shape[0] == 0:
        order_TE = torch.sort(values_TE, dim=1, descending=True, stable=True).indices
        return order_TE[:, :top_k]
    left_TE = values_TE.detach()
    if top_k > 1:
        left_TE = left_TE.clamp(min=torch.finfo(left_TE.dtype).min)
    found = [_largest(left_TE)]
    for _ in range(top_k - 1):
        left_TE = left_TE.scatter(1, found[-1], -torch.inf)
        found.append(_largest(left_TE))
    return torch.cat(found, dim=1) if top_k > 1 else found[0]


def _largest(values_TE: Tensor) -> Tensor:
    """The place of each row's largest value, int64 [T, 1], of equals the first."""
    if _choices_alone.get() and values_TE.dtype != torch.bfloat16:  # which numpy has not
        return torch.from_numpy(values_TE.numpy().argmax(axis=1, keepdims=True))
    return values_TE.argmax(dim=1, keepdim=True)


@contextmanager
def choices_alone() -> Iterator[None]:
    """Inside, only what rules choose counts, and not by which operators: nobody times or records them.

    Numbers of a CPU then go through numpy, whose loop over 64 experts takes less than half of torch's time.
    """
    before = _choices_alone.set(True)
    try:
        yield
    finally:
        _choices_alone.reset(before)


def positions(experts_N: Tensor) -> Tensor:
    """The place of each route among the earlier routes of its expert: 0, 1, 2, ...; -1 where there is no route."""
    order_N = torch.argsort(experts_N, stable=True)
    sorted_N = experts_N[order_N]
    first_N = torch.searchsorted(sorted_N, sorted_N)
    places_N = torch.empty_like(experts_N)
    places_N[order_N] = torch.arange(len(experts_N), device=experts_N.device) - first_N
    return places_N.where(experts_N >= 0, NO_ROUTE)


def drop(
    experts_TK: Tensor,
    probs_TE: Tensor,
    capacity: int,
    conventions: Conventions,
    generator: torch.Generator | None = None,
    order_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Which routes get one of their expert's C slots, and which slot: (keep_TK, slots_TK).

    Routes queue in arrival order (`choice_order`). Who goes first when slots run out is said by `drop_order`, or where
    it is given by `order_T`, which takes the place of the tokens' order in the queue. The survivors take their slots in
    arrival order.
    """
    tokens, top_k = experts_TK.shape
    choice_major = conventions.choice_order == "choice-major"

    def queue(x_TK: Tensor) -> Tensor:
        return (x_TK.t() if choice_major else x_TK).reshape(-1)

    def leave(x_N: Tensor) -> Tensor:
        return x_N.view(top_k, tokens).t() if choice_major else x_N.view(tokens, top_k)

    experts_N = queue(experts_TK)
    if order_T is not None:
        choice_K = torch.arange(top_k, device=order_T.device)
        by_choice_KT, by_token_TK = choice_K[:, None] * tokens + order_T, order_T[:, None] * top_k + choice_K
        priority_N = (by_choice_KT if choice_major else by_token_TK).reshape(-1)
    elif conventions.drop_order == "random":
        priority_N = torch.randperm(len(experts_N), generator=generator, device=experts_N.device)
    elif conventions.drop_order == "probability":
        probs_N = queue(probs_TE.detach().gather(1, experts_TK.clamp(min=0)))
        priority_N = torch.argsort(probs_N, descending=True, stable=True)
    else:
        priority_N = torch.arange(len(experts_N), device=experts_N.device)
    places_N = torch.empty_like(experts_N)
    places_N[priority_N] = positions(experts_N[priority_N])
    keep_N = (experts_N >= 0) & (places_N < capacity)
    slots_N = positions(experts_N.where(keep_N, NO_ROUTE))
    return leave(keep_N).contiguous(), leave(slots_N).contiguous()


def normalised(weights_TK: Tensor) -> Tensor:
    """Weights divided by their sum over the choices of a token; a token without any keeps zeros."""
    total_T1 = weights_TK.sum(dim=1, keepdim=True)
    return weights_TK / total_T1.clamp(min=torch.finfo(weights_TK.dtype).eps)


def weights_of(probs_TE: Tensor, experts_TK: Tensor, conventions: Conventions) -> Tensor:
    """The probabilities of the chosen experts, which all exist; over their sum under `before-drop`."""
    weights_TK = probs_TE.gather(1, experts_TK)
    return normalised(weights_TK) if conventions.normalisation == "before-drop" else weights_TK


def final_weights(weights_TK: Tensor, keep_TK: Tensor, conventions: Conventions) -> Tensor:
    """The weights after the drops: zero where dropped; `after-drop` shares the weight among the survivors."""
    kept_TK = weights_TK * keep_TK
    return normalised(kept_TK) if conventions.normalisation == "after-drop" else kept_TK


def balance_loss(probs_TE: Tensor, choices_TK: Tensor, conventions: Conventions) -> Tensor:
    """auxiliary x (E/K) x sum_e P_e f_e: P_e the mean probability, f_e the choices of e per token; 0 without tokens.

    Equals `auxiliary` when tokens and probabilities are spread evenly. The choices carry no gradient.
    """
    tokens, experts = probs_TE.shape
    if tokens == 0:
        return probs_TE.sum() * 0
    share_E = count(choices_TK, experts).to(probs_TE.dtype) / tokens
    return conventions.auxiliary * experts / choices_TK.shape[1] * (probs_TE.mean(dim=0) * share_E).sum()


def _capacity(
    choice: Choice, counts_E: Tensor, conventions: Conventions, capacity_factor: float, max_count: MaxCount
) -> int:
    (tokens, top_k), experts = choice.experts_TK.shape, len(counts_E)
    if choice.capacity is not None:
        return choice.capacity
    if not conventions.is_dropless:
        return conventions.capacity(tokens, experts, top_k, capacity_factor)
    if max_count is None:
        max_count = int(counts_E.max())
    most = max_count if isinstance(max_count, int) else max_count(counts_E)
    return conventions.aligned(max(conventions.min_capacity, most))


def loads(choice: Choice, conventions: Conventions, capacity_factor: float) -> tuple[Tensor, Tensor]:
    """Routes to each expert before and after the drops, int64 [E] each; without capacity the same.

    Whoever goes first, an expert keeps as many as it has slots: no queue is needed, which is most of `settle`'s work.
    """
    counts_E = count(choice.experts_TK, choice.probs_TE.shape[1])
    capacity = _capacity(choice, counts_E, conventions, capacity_factor, None)
    return counts_E, counts_E.clamp(max=capacity)


def settle(
    choice: Choice,
    conventions: Conventions,
    capacity_factor: float,
    generator: torch.Generator | None = None,
    max_count: MaxCount = None,
) -> Routing:
    """The last step of every rule: capacity, drops, final weights."""
    experts_TK, probs_TE = choice.experts_TK, choice.probs_TE
    counts_E = count(experts_TK, probs_TE.shape[1])
    capacity = _capacity(choice, counts_E, conventions, capacity_factor, max_count)
    keep_TK, slots_TK = drop(experts_TK, probs_TE, capacity, conventions, generator, choice.order_T)
    weights_TK = final_weights(choice.weights_TK, keep_TK, conventions)
    aux = sum(choice.aux_terms.values(), start=probs_TE.new_zeros(()))
    return Routing(
        experts_TK, weights_TK, keep_TK, slots_TK, probs_TE, aux, counts_E, capacity, choice.aux_terms, choice.rounds
    )
