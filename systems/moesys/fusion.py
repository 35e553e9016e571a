"""Fusion communication: parameters and gradients of many tensors in few flat buffers, as Paddle keeps them.

Tensors of one kind (gate, expert, other; decayed or not; dtype, device) share groups of at most `group_bytes`, each
starting at a multiple of `alignment` bytes. Parameters become views of a parameter buffer, and gradients are
accumulated into views of a gradient buffer. So one collective sums a whole group as soon as its last gradient is there,
without a copy before or after, and one step of Adam updates it. Experts' gradients are never summed over the ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import Pending, start_all_reduce_
from moebench.kernels.optimizer import AdamW
from moebench.kernels.region import region
from moebench.systems.moesys.experts import AdamOptions

ROLES = ("gate", "expert", "other")
GROUP_BYTES, ALIGNMENT = 256 * 2**20, 256  # of Paddle


@dataclass(eq=False)
class FusedGroup:
    """Tensors whose parameters and gradients lie one after another.

    Attributes:
        role: one of `ROLES`; decays: whether weights decay.
        params: the tensors, with the element at which each starts in `starts`.
        parameters_N, gradients_N: the buffers; gaps are zero and stay zero.
    """

    role: str
    decays: bool
    params: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    size: int = 0
    parameters_N: Tensor = field(default_factory=lambda: torch.empty(0))
    gradients_N: Tensor = field(default_factory=lambda: torch.empty(0))
    missing: int = 0
    pending: Pending | None = None

    @property
    def nbytes(self) -> int:
        """Of each of the two buffers."""
        return self.parameters_N.nbytes


def role_of(param: Tensor) -> str:
    """`expert` for what is marked `is_expert`, `gate` for what is marked `is_gate`, else `other`."""
    if getattr(param, "is_expert", False):
        return "expert"
    return "gate" if getattr(param, "is_gate", False) else "other"


class FusedBuffers:
    """Parameters in fused buffers, their gradients summed group by group, and Adam over whole groups.

    Every rank must hold the same parameters in the same order. After `zero_gradients` a backward fills the buffers and
    sums each group over its ranks once its last gradient is there, in the same order everywhere; `finish` waits, `step`
    updates.

    Args:
        params: their data move into the buffers.
        groups: by role, over which ranks gradients are summed; a role that is not there is not summed. `expert` may
            not be there.
        decays: which tensors decay; default those with two dimensions or more.
        group_bytes: a larger tensor is a group by itself.

    Raises:
        ValueError: alignment or group size without a meaning, an unknown role, or experts that would be summed.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        groups: Mapping[str, Group],
        options: AdamOptions | None = None,
        decays: Callable[[Tensor], bool] | None = None,
        group_bytes: int = GROUP_BYTES,
        alignment: int = ALIGNMENT,
    ) -> None:
        _check(groups, group_bytes, alignment)
        self.over, self.options = groups, options or AdamOptions()
        decays = decays or (lambda param: param.dim() > 1)
        self.groups = _assigned([p for p in params if p.requires_grad], decays, group_bytes, alignment)
        for fused in self.groups:
            _fill(fused)
        self._summed = [fused for fused in self.groups if fused.role in groups and groups[fused.role].size > 1]
        self._next = 0
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._taker(fused))
            for fused in self._summed
            for param in fused.params
        ]
        self.adams = [self._adam(fused) for fused in self.groups]

    def zero_gradients(self) -> None:
        """Before a backward."""
        with region("grad-sync"), torch.no_grad():
            for fused in self.groups:
                fused.gradients_N.zero_()
                fused.missing = len(fused.params)
                for param, start in zip(fused.params, fused.starts):
                    param.grad = fused.gradients_N[start : start + param.numel()].view(param.shape)
        self._next = 0

    def finish(self) -> None:
        """Sum what is left, such as groups with a parameter that got no gradient, and wait for every sum."""
        with region("grad-sync"), torch.no_grad():
            while self._next < len(self._summed):
                self._start_next()
            for fused in self._summed:
                assert fused.pending is not None
                fused.pending.wait()
                fused.pending = None

    def step(self) -> None:
        """Update all parameters, those without a gradient too: theirs is zero."""
        with region("optimizer"):
            for adam in self.adams:
                adam.step()

    def _adam(self, fused: FusedGroup) -> AdamW:
        options = self.options
        weight_decay = options.weight_decay if fused.decays else 0.0
        flat_N = fused.parameters_N.detach().requires_grad_()
        flat_N.grad = fused.gradients_N
        return AdamW([flat_N], options.lr, options.betas, options.eps, weight_decay)

    def _taker(self, fused: FusedGroup) -> Callable[[Tensor], None]:
        def take(param: Tensor) -> None:
            fused.missing -= 1
            with region("grad-sync"), torch.no_grad():
                while self._next < len(self._summed) and not self._summed[self._next].missing:
                    self._start_next()

        return take

    def _start_next(self) -> None:
        fused = self._summed[self._next]
        fused.pending = start_all_reduce_(fused.gradients_N, self.over[fused.role])
        self._next += 1


def _check(groups: Mapping[str, Group], group_bytes: int, alignment: int) -> None:
    for role in groups:
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; choose one of {', '.join(ROLES)}")
    if "expert" in groups:
        raise ValueError("an expert's gradient is whole on its rank: it is not summed")
    if alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"alignment = {alignment}: a power of two of at least 8 bytes")
    if group_bytes < 1:
        raise ValueError(f"group_bytes = {group_bytes}: at least 1")


def _assigned(
    params: Iterable[Tensor], decays: Callable[[Tensor], bool], group_bytes: int, alignment: int
) -> list[FusedGroup]:
    """Groups in the order of the last parameter of each, backwards, which is roughly that of their gradients."""
    closed: list[FusedGroup] = []
    open_groups: dict[tuple, FusedGroup] = {}
    for param in reversed(list(params)):
        kind = (role_of(param), decays(param), param.dtype, param.device)
        step = max(alignment // param.element_size(), 1)
        padded = -(-param.numel() // step) * step
        fused = open_groups.get(kind)
        if fused is None or (fused.size + padded) * param.element_size() > group_bytes:
            fused = open_groups[kind] = FusedGroup(kind[0], kind[1])
            closed.append(fused)
        fused.params.append(param)
        fused.starts.append(fused.size)
        fused.size += padded
    return closed


def _fill(fused: FusedGroup) -> None:
    """Move the parameters into their buffer."""
    first = fused.params[0]
    fused.parameters_N = torch.zeros(fused.size, dtype=first.dtype, device=first.device)
    fused.gradients_N = torch.zeros_like(fused.parameters_N)
    for param, start in zip(fused.params, fused.starts):
        place = fused.parameters_N[start : start + param.numel()].view(param.shape)
        place.copy_(param.detach())
        param.data = place
