"""FasterMoE's smart schedule: exchanges cut into steps between groups of ranks, so that experts start on what is there.

In step s a rank sends to the group s places ahead of its own and receives from the one s places behind. Forward: all
sends S_0 .. S_n, broadcasts of shadowed experts, C_0 .. C_n as rows arrive, the shadows on this rank's own rows, all
returns R_0 .. R_n. The backward is the same the other way, with the shadows first, so that their gradients are summed
while the others are computed. As in the package this is one autograd node: the graph of every call of an expert lives
inside it, and buffers are zeroed and filled part by part.

R ranks, L experts of a rank, D model; N rows that a rank sends or keeps for its shadows, M rows that it receives; P
parameters of an expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.parts import Parts
from moebench.kernels.collectives.start_wait import start_broadcast, start_reduce
from moebench.kernels.expert_ffn import expert_ffn
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
        experts: the local expert of each.
        shadows: in the order of experts.
        rows: N.
    """

    parts: Parts
    experts: tuple[int, ...]
    shadows: tuple[Shadow, ...]
    rows: int


def group_steps(ranks: int, group_size: int, rank: int) -> Steps:
    """Ranks to send to and ranks to receive from in every step; the last group may be smaller."""
    groups = [range(first, min(first + group_size, ranks)) for first in range(0, ranks, group_size)]
    mine, count = rank // group_size, len(groups)
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
        parts, sent = schedule.parts, sum(schedule.parts.sent)
        with region("exchange"):
            flats = [_parameters_of(experts, shadow, parts.group.index) for shadow in schedule.shadows]
            x_MD, out_MD = (x_ND.new_zeros(sum(parts.received), x_ND.shape[1]) for _ in range(2))
            y_ND = torch.zeros_like(x_ND)
            coming = parts.start_into(x_MD, x_ND[:sent])
            size = sum(parameter.numel() for parameter in experts[0].parameters())
            shared = [
                start_broadcast(flat, parts.group, size, shadow.root)
                for flat, shadow in zip(flats, schedule.shadows, strict=True)
            ]
            outs = out_MD.split(parts.received)
            own = [(x_ND[shadow.rows], y_ND[shadow.rows]) for shadow in schedule.shadows]
        ctx.calls, ctx.shadowed = [], []
        for pending, index, out_ND in zip(coming, schedule.experts, outs, strict=True):
            with region("exchange"):
                rows_ND = pending.wait()
            ctx.calls.append(_called(experts[index], rows_ND, out_ND, needs_x, is_trained))
        for pending, (rows_ND, out_ND) in zip(shared, own, strict=True):
            with region("exchange"):
                weights = _leaves(pending.wait(), experts[0])
            call = _called(_with(weights, experts[0]), rows_ND, out_ND, needs_x, is_trained)
            ctx.shadowed.append((weights, call))
        with region("exchange"):
            _bring_back(parts, y_ND[:sent], out_MD)
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ND):
        schedule, needs_x = ctx.schedule, ctx.needs_input_grad[0]
        parts, sent = schedule.parts, sum(schedule.parts.sent)
        with region("exchange"):
            dy_ND = dy_ND.contiguous()
            dy_MD, dx_MD = (dy_ND.new_zeros(sum(parts.received), dy_ND.shape[1]) for _ in range(2))
            dx_ND = torch.zeros_like(dy_ND)
            coming = parts.start_into(dy_MD, dy_ND[:sent])
            gradients = dx_MD.split(parts.received)
            own = [(dy_ND[shadow.rows], dx_ND[shadow.rows]) for shadow in schedule.shadows]
        sums = []
        for shadow, (weights, call), (dy, dx) in zip(schedule.shadows, ctx.shadowed, own, strict=True):
            _differentiated(call, dy, dx if needs_x else None)
            with region("exchange"):
                sums.append(start_reduce(_gradients_of(weights), parts.group, shadow.root))
        for pending, call, gradient_ND in zip(coming, ctx.calls, gradients, strict=True):
            with region("exchange"):
                upstream_ND = pending.wait()
            _differentiated(call, upstream_ND, gradient_ND if needs_x else None)
        with region("exchange"):
            for shadow, pending in zip(schedule.shadows, sums, strict=True):
                flat = pending.wait()
                if shadow.root == parts.group.index:
                    _accumulate(ctx.experts[shadow.index], flat)
            _zero_missing(ctx.experts)
            if needs_x:
                _bring_back(parts, dx_ND[:sent], dx_MD)
        ctx.calls = ctx.shadowed = None
        return (dx_ND if needs_x else None, None, None, *[None] * (len(ctx.needs_input_grad) - 3))


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
    if dx_ND is not None:
        with region("experts"):
            dx_ND.copy_(call.rows_ND.grad)


def _bring_back(parts: Parts, to_ND: Tensor, from_MD: Tensor) -> None:
    for pending in parts.reversed().start_into(to_ND, from_MD):
        pending.wait()


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
