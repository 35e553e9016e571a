"""What is timed of a case on real tensors; of a layer, the training step of one rank, alone in one process or with its
peers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench import kinds
from moebench.cases.case import Case
from moebench.cases.layers import layer_of
from moebench.kernels.collectives.group import Group, described_group
from moebench.program import Program
from moebench.systems.interface import LayerWeights, problem
from moebench.workloads.dtypes import torch_dtype
from moebench.workloads.layer import LayerWorkload


class CannotRun(Exception):
    """This case has no measured number here; the text is the reason."""


@dataclass(frozen=True)
class Step:
    """A unit of a case's work, ready to run again and again.

    Attributes:
        run: of a layer: forward, backward, gradient sync of one rank, optimiser. Of a kernel: one call.
        persistent: tensors that live from step to step.
        counted: what `run` executes, where a trace has counted it.
        is_recordable: whether a recorder around `run` can count it too: every operator is in a region.
        turns: after so many runs it does the same again.
    """

    run: Callable[[], object]
    persistent: tuple[Tensor, ...]
    counted: Program | None = None
    is_recordable: bool = True
    turns: int = 1

    @property
    def all_turns(self) -> Callable[[], object]:
        """All turns, one after another: the same whenever it is called."""
        return self.run if self.turns == 1 else lambda: [self.run() for _ in range(self.turns)]


def build_step(case: Case, device: torch.device, group: Group | None = None) -> Step:
    """What is timed of `case`.

    Args:
        group: the real ranks that run it together; default one rank alone.

    Raises:
        CannotRun: with the reason. Skipped: it could run, and isn't worth it here.
    """
    return kinds.of(case.workload.kind, "step")(case, device, group)


def layer_step(case: Case, device: torch.device, group: Group | None = None) -> Step:
    """One training step of `case` on real tensors.

    The learning rate is zero and the layer stands still: everything does all of its work, and every step sees the same
    weights and routes the same tokens.

    Args:
        group: the real ranks that run it together; default one rank alone.

    Raises:
        CannotRun: the system doesn't support the workload.
    """
    from moebench.systems.registry import conventions_of, get
    from moebench.systems.training import TrainingStep
    from moebench.workloads.routing import imposed_input

    system, workload = get(case.system), layer_of(case)
    conventions = conventions_of(system, workload.gate, case.conventions)
    group = group or described_group(1)
    reason = problem(system, workload, conventions, group.size)
    if reason:
        raise CannotRun(reason)
    dtype = torch_dtype(workload.dtype)
    layer = system.build(workload, group, conventions, device, dtype)
    x_TD, gate_DE = imposed_input(workload, group.rank)
    layer.load_weights(_weights(workload, group, gate_DE, dtype, device))
    x_TD = x_TD.to(device, dtype).requires_grad_(workload.input_gradient)
    # Of the mean of the ranks' losses, as TrainingStep expects it.
    upstream_TD = _normal((workload.routing.seed + 1, group.rank), x_TD.shape, device, dtype, 1 / group.size)
    step = TrainingStep(layer, group, learning_rate=0.0, stands_still=True)
    return Step(lambda: step(x_TD, upstream_TD), (x_TD, upstream_TD, *layer.parameters(), *layer.buffers()))


def _weights(
    workload: LayerWorkload, group: Group, gate_DE: Tensor, dtype: torch.dtype, device: torch.device
) -> LayerWeights:
    """The same router on every rank, other experts on each."""
    sharers = workload.sharers(group.size)
    local, d, f = max(1, workload.experts // group.size), workload.d_model, workload.d_ffn // sharers
    seed, rank = workload.routing.seed + 2, group.rank
    gated = workload.activation == "swiglu"
    return LayerWeights(
        gate_DE=gate_DE.to(device),
        w1_LDF=_normal((seed, rank), (local, d, f), device, dtype, d**-0.5),
        w2_LFD=_normal((seed + 1, rank), (local, f, d), device, dtype, f**-0.5),
        w3_LDF=_normal((seed + 2, rank), (local, d, f), device, dtype, d**-0.5) if gated else None,
    )


def _normal(
    seed: tuple[int, int], shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Values of a seed and a rank: products of zeros run faster than products of numbers."""
    generator = torch.Generator().manual_seed(seed[0] << 32 | seed[1])
    return (torch.randn(tuple(shape), generator=generator) * scale).to(device, dtype)
