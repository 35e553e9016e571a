"""What a system is: a name, what it supports, and a layer built from the shared kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload


@dataclass(frozen=True)
class LayerWeights:
    """Weights (or their gradients) of the experts that a rank holds, L = E / R, in one layout for every system.

    Attributes:
        gate_DE: router, no bias; not used where the rule has no router.
        w1_LDF, w2_LFD: the experts' products; w3_LDF is the second input product of SwiGLU, else None.
    """

    gate_DE: Tensor
    w1_LDF: Tensor
    w2_LFD: Tensor
    w3_LDF: Tensor | None = None


class MoELayer(nn.Module):
    """A layer of one rank. `forward(x_TD) -> (y_TD, aux)`; aux is a scalar tensor, the auxiliary loss.

    Gate parameters live in `self.gate`; expert parameters carry `is_expert = True`, which keeps them out of
    gradient synchronisation.

    Attributes:
        tokens_of_ranks: T of every rank for the next calls, where they differ and whoever runs the layer knows; a
            layer that gathers the ranks' tokens needs it then. None says that all ranks have equally many.
    """

    tokens_of_ranks: tuple[int, ...] | None = None

    def advance(self, stands_still: bool = False) -> None:
        """After a training step's backward: what changes from step to step and is no parameter; here nothing does.

        Args:
            stands_still: do the work, but leave everything as it was.
        """

    def load_weights(self, weights: LayerWeights) -> None:
        """Copy `weights` into this layer's parameters."""
        raise NotImplementedError

    def weight_gradients(self) -> LayerWeights:
        """The gradients of this layer's parameters, in the common layout; zeros where autograd left None."""
        raise NotImplementedError


@runtime_checkable
class System(Protocol):
    """A way to run the layer; built-in (moebench.systems.registry) or from the entry-point group `moebench.systems`.

    One that can share an expert among ranks, where there are fewer experts than ranks, has a method
    `ranks_problem(workload, ranks)` besides: None, or why it can't run the workload on so many.
    """

    name: str
    title: str
    source: str

    def supports(self, workload: LayerWorkload, conventions: Conventions) -> str | None:
        """None, or the reason why this system can't run the workload under these conventions."""

    def as_shipped(self, gate: GateSpec) -> Conventions:
        """The conventions of the real system for a gate."""

    def build(
        self, workload: LayerWorkload, group: Group, conventions: Conventions, device: torch.device, dtype: torch.dtype
    ) -> MoELayer:
        """The layer of this rank, parameters uninitialised or random; `device` may be meta."""


def supported(system: System, workload: LayerWorkload, conventions: Conventions) -> str | None:
    """What a system says to a workload: None, or why it can't run it.

    Raises:
        TypeError: it says something else.
    """
    reason = system.supports(workload, conventions)
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    raise TypeError(f"supports of {system.name} gives {reason!r}; it must give None or the reason why not")


def problem(system: System, workload: LayerWorkload, conventions: Conventions, ranks: int) -> str | None:
    """Why a system can't run a workload on so many ranks, or why that has no meaning; None when it can."""
    reason = workload.problem(ranks) or supported(system, workload, conventions)
    own: Callable[[LayerWorkload, int], str | None] | None = getattr(system, "ranks_problem", None)
    if reason is None and own is not None:
        reason = own(workload, ranks)
    elif reason is None and workload.sharers(ranks) > 1:
        reason = f"experts = {workload.experts} on ranks = {ranks}: {system.name} can't share an expert among ranks"
    return reason


@runtime_checkable
class Configurable(Protocol):
    """A system with options: `tutel+degree=4` is the variant of `tutel` that always splits in four."""

    def variant(self, options: Mapping[str, str]) -> System:
        """The system with these options, written as text; its name states them.

        Raises:
            InputError: an option that it does not have, or a value that it refuses.
        """
