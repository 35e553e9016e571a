"""FasterMoE's smart schedule: exchanges cut into steps between groups of ranks, so that experts start on what is there.

In step s a rank sends to the group s places ahead of its own and receives from the one s places behind. Forward: all
sends S_0 .. S_n, broadcasts of shadowed experts, the experts C_0 .. C_n as rows arrive with each step's return R_s
behind it, the shadows on this rank's own rows. The backward is the same the other way, with the shadows first, so that
their gradients are summed while the others are computed. As in the package this is one autograd node: the graph of
every call of an expert lives inside it, buffers are zeroed and filled part by part, and the host waits for its streams
before and behind it, in both directions.

R ranks, L experts of a rank, D model; N rows that a rank sends or keeps for its shadows, M rows that it receives; P
parameters of an expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.parts import Parts
from moebench.kernels.collectives.start_wait import Pending, start_broadcast, start_reduce
from moebench.kernels.expert_ffn import expert_ffn
from moebench.kernels.host import synchronise
from moebench.kernels.region import region
from moebench.systems.layer import Expert

Steps = list[tuple[range, range]]


@dataclass(frozen=True)
class Shadow:
    """An expert whose parameters every rank gets, and this rank's rows for it, behind all rows that are sent."""

    root: int
    index: int
    rows: slice


@dataclass(frozen=True)
class Schedule:
    """What one rank does.

    Attributes:
        parts: an exchange for each step and local expert, step by step.
        shadows: in the order of experts.
    """

    parts: Parts
    shadows: tuple[Shadow, ...]


def group_steps(ranks: int, group_size: int, mine: int) -> Steps:
    """Ranks to send to and ranks to receive from in every step, for those of group `mine`; the last may be smaller."""
    groups = [range(first, min(first + group_size, ranks)) for first in range(0, ranks, group_size)]
    count = len(groups)
    return [(groups[(mine + step) % count], groups[(mine - step) % count]) for step in range(count)]


@dataclass(frozen=True)
class _Call:
    """One call of an expert: the leaf of its graph and its end."""

    rows_ND: Tensor
    result_ND: Tensor


def run_schedule(x_ND: Tensor, schedule: Schedule, experts: Sequence[Expert]) -> Tensor:
    """The rows through their experts, wherever those are: y [N, D], in the order of x; differentiable.

    Args:
        x_ND: what the parts send, then the rows of the shadows.
        experts: of this rank.
    """
    parameters = [parameter for expert in experts for parameter in expert.parameters()]
    return _SmartSchedule.apply(x_ND, schedule, experts, *parameters)


class _SmartSchedule(torch.autograd.Function):
    """Parameters are arguments so that the backward runs when the input needs no gradient; theirs are summed inside."""

    @staticmethod
    def forward(ctx, x_ND, schedule, experts, *parameters):
        ctx.schedule, ctx.experts = schedule, experts
        needs_x, is_trained = ctx.needs_input_grad[0], any(ctx.needs_input_grad)
        parts = schedule.parts
        with region("exchange"):
            flats = [_parameters_of(experts, shadow, parts.group.index) for shadow in schedule.shadows]
            buffers, coming = _sent(x_ND, schedule)
            size = sum(parameter.numel() for parameter in experts[0].parameters())
            shared = [
                start_broadcast(flat, parts.group, size, shadow.root)
                for flat, shadow in zip(flats, schedule.shadows, strict=True)
            ]
        ctx.calls, ctx.shadowed = [], []

        def call(number: int, rows_ND: Tensor) -> None:
            expert = experts[number % len(experts)]
            ctx.calls.append(_called(expert, rows_ND, buffers.results[number], needs_x, is_trained))

        going = _in_steps(coming, buffers, schedule, len(experts), call)
        for pending, rows_ND, out_ND in zip(shared, buffers.own, buffers.own_results, strict=True):
            with region("exchange"):
                weights = _leaves(pending.wait(), experts[0])
            ctx.shadowed.append((weights, _called(_with(weights, experts[0]), rows_ND, out_ND, needs_x, is_trained)))
        with region("exchange"):
            for pending in going:
                pending.wait()
            synchronise(buffers.whole)
        return buffers.whole

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ND):
        schedule, experts, needs_x = ctx.schedule, ctx.experts, ctx.needs_input_grad[0]
        parts = schedule.parts
        with region("exchange"):
            buffers, coming = _sent(dy_ND.contiguous(), schedule)
        sums = []
        for shadow, (weights, call), dy, dx in zip(
            schedule.shadows, ctx.shadowed, buffers.own, buffers.own_results, strict=True
        ):
            _differentiated(call, dy, dx if needs_x else None)
            with region("exchange"):
                sums.append(start_reduce(_gradients_of(weights), parts.group, shadow.root))

        def differentiate(number: int, upstream_ND: Tensor) -> None:
            _differentiated(ctx.calls[number], upstream_ND, buffers.results[number] if needs_x else None)

        going = _in_steps(coming, buffers, schedule, len(experts), differentiate, needs_x)
        with region("exchange"):
            for shadow, pending in zip(schedule.shadows, sums, strict=True):
                flat = pending.wait()
                if shadow.root == parts.group.index:
                    _accumulate(experts[shadow.index], flat)
            _zero_missing(experts)
            for pending in going:
                pending.wait()
            synchronise(buffers.whole)
        ctx.calls = ctx.shadowed = None
        return (buffers.whole if needs_x else None, None, None, *[None] * (len(ctx.needs_input_grad) - 3))


@dataclass(frozen=True)
class _Buffers:
    """Where results go, part by part: of those that came, and of the rows that travel or stay here.

    Attributes:
        results: [M, D] by part.
        returned: the rows of `whole` that travel, by part.
        own, own_results: the shadows' rows of what travels and of `whole`.
        whole: [N, D].
    """

    results: Sequence[Tensor]
    returned: Sequence[Tensor]
    own: Sequence[Tensor]
    own_results: Sequence[Tensor]
    whole: Tensor


def _sent(x_ND: Tensor, schedule: Schedule) -> tuple[_Buffers, list[Pending]]:
    """Buffers of zeros, and every part of the rows on its way, once the device has made those."""
    synchronise(x_ND)
    parts, back = schedule.parts, schedule.parts.reversed()
    came_MD, results_MD = (x_ND.new_zeros(sum(parts.received), x_ND.shape[1]) for _ in range(2))
    whole_ND = torch.zeros_like(x_ND)
    sent = sum(parts.sent)
    coming = parts.start_all(came_MD, x_ND[:sent])
    own, own_results = ([x[shadow.rows] for shadow in schedule.shadows] for x in (x_ND, whole_ND))
    return _Buffers(back.cut(results_MD), parts.cut(whole_ND[:sent]), own, own_results, whole_ND), coming


def _in_steps(
    coming: Sequence[Pending],
    buffers: _Buffers,
    schedule: Schedule,
    local: int,
    work: Callable[[int, Tensor], None],
    returns: bool = True,
) -> list[Pending]:
    """Do the work of each part as it arrives; after each step's, start to bring its results back."""
    going: list[Pending] = []
    back = schedule.parts.reversed()
    for number, pending in enumerate(coming):
        with region("exchange"):
            rows_ND = pending.wait()
        work(number, rows_ND)
        if returns and number % local == local - 1:
            with region("exchange"):
                going += [
                    back.start(part, buffers.returned[part], buffers.results[part])
                    for part in range(number + 1 - local, number + 1)
                ]
    return going


def _called(
    expert: Callable[[Tensor], Tensor], rows_ND: Tensor, out_ND: Tensor, needs_x: bool, is_trained: bool
) -> _Call | None:
    """Call an expert and keep its graph; nothing where there are no rows."""
    if not len(rows_ND):
        return None
    with region("experts"):
        rows_ND = rows_ND.detach().requires_grad_(needs_x)
        with torch.set_grad_enabled(is_trained):
            result_ND = expert(rows_ND)
        out_ND.copy_(result_ND)
    return _Call(rows_ND, result_ND)


def _differentiated(call: _Call | None, dy_ND: Tensor, dx_ND: Tensor | None) -> None:
    """The backward of a call's graph, whose operators belong to the regions of the forward."""
    if call is None:
        return
    torch.autograd.backward([call.result_ND], [dy_ND])
    grad_ND = call.rows_ND.grad
    if dx_ND is not None and grad_ND is not None:
        with region("experts"):
            dx_ND.copy_(grad_ND)


def _parameters_of(experts: Sequence[Expert], shadow: Shadow, rank: int) -> Tensor:
    """[P] of the shadowed expert where it lives, nothing elsewhere."""
    if shadow.root != rank:
        return experts[0].w1_DF.new_empty(0)
    return torch.cat([parameter.reshape(-1) for parameter in experts[shadow.index].parameters()])


def _leaves(flat: Tensor, like: Expert) -> list[Tensor]:
    """The parameters where they arrived, each with a gradient of its own."""
    own = list(like.parameters())
    pieces = flat.split([parameter.numel() for parameter in own])
    return [
        piece.view(parameter.shape).detach().requires_grad_() for piece, parameter in zip(pieces, own, strict=True)
    ]


def _with(weights: Sequence[Tensor], like: Expert) -> Callable[[Tensor], Tensor]:
    """An expert with other parameters; theirs are in the order of `Expert.parameters()`: w1, w2 and perhaps w3."""
    w1_DF, w2_FD, *w3 = weights
    return lambda x_ND: expert_ffn(x_ND, w1_DF, w2_FD, w3[0] if w3 else None, like.activation)


def _gradients_of(weights: Sequence[Tensor]) -> Tensor:
    """[P]; zeros where this rank had no rows."""
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).reshape(-1) for w in weights])


def _accumulate(expert: Expert, flat: Tensor) -> None:
    own = list(expert.parameters())
    for parameter, piece in zip(own, flat.split([parameter.numel() for parameter in own]), strict=True):
        if parameter.grad is None:
            parameter.grad = piece.view(parameter.shape).clone()
        else:
            parameter.grad += piece.view(parameter.shape)


def _zero_missing(experts: Sequence[Expert]) -> None:
    """An expert without rows has a gradient all the same, on every rank."""
    for parameter in (parameter for expert in experts for parameter in expert.parameters()):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
