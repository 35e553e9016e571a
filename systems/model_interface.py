"""What a system is that runs whole models: it builds the training step of a rank.

One that plans by what things cost (`is_profiled`) is given a profile of the place where the step will run: of ranks
that run it, or of a machine that is only described.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.systems.lancet.capture import StepGraph
from moebench.systems.lancet.optimise import Optimised, Prices
from moebench.workloads.models.gpt2_moe import GPT2MoE, MakeLayer
from moebench.workloads.models.moe import MoE
from moebench.workloads.models.shape import GPT2MoEShape

Profile = Callable[[StepGraph], Prices]


@dataclass(frozen=True)
class Place:
    """Where a step is built for.

    Attributes:
        profile: from a model, a step's data and the group to what prices its graphs; called by profiled systems only.
        memory_bytes: of a device; None: no limit.
        dtype: of parameters and activations.
        tell: called with a line for each stage of planning.
    """

    group: Group
    device: torch.device
    profile: Callable[[GPT2MoE, Sequence[Tensor], Group], Profile] | None = None
    memory_bytes: int | None = None
    dtype: torch.dtype = torch.float32
    tell: Callable[[str], None] = lambda line: None


def _nothing() -> None:
    """What a layer without chance does before a step."""


@dataclass(frozen=True)
class Definition:
    """What is right, in plain autograd.

    Attributes:
        make_layer: the MoE layers of the model.
        begin: called before every step.
    """

    make_layer: MakeLayer = MoE
    begin: Callable[[], None] = _nothing


@dataclass(frozen=True)
class ModelStep:
    """A training step of one rank, ready to run again and again.

    Attributes:
        run: from ids [B, S] and labels [B, S] to the loss of this rank; gradients stand in the parameters' `grad`.
        parameters: and what else of the training lives from step to step.
        gradients: by name, once `run` has run; names and layout are those of `moebench.workloads.models.GPT2MoE`.
        planned: what a profiled system decided; None on ranks that loaded what another one planned.
        define: makes what the step is compared with, anew for every model: the model's own layers, but where a system
            brings a gate that keeps other tokens.
        kept: from a function that gives the logits [T, E] of a rank, float32, to the routes that each expert computes
            of each rank, int64 [R, E], or of the first ranks where ranks don't wait for each other; None: not said.
    """

    run: Callable[[Sequence[Tensor]], Tensor]
    parameters: list[Tensor]
    gradients: Callable[[], dict[str, Tensor]]
    planned: Optimised | None = None
    define: Callable[[], Definition] = Definition
    kept: Callable[[Callable[[int], Tensor]], Tensor] | None = None


@runtime_checkable
class ModelSystem(Protocol):
    """A way to train a GPT-2 with MoE layers."""

    name: str
    title: str
    source: str
    is_profiled: bool

    def supports(self, shape: GPT2MoEShape, ranks: int) -> str | None:
        """None, or why this system can't run the model on so many ranks."""

    def build(self, shape: GPT2MoEShape, place: Place, seed: int = 0, learning_rate: float = 0.0) -> ModelStep:
        """The step of this rank; weights by `seed`, the same for every system."""
