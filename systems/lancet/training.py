"""A training step of a whole model: by eager autograd, which is the reference, and by an executor of its plan."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_reduce
from moebench.kernels.optimizer import sgd_step
from moebench.kernels.region import region
from moebench.systems.lancet.executor import Executor, Span
from moebench.systems.lancet.plan import Plan


class PlannedStep:
    """Calling it runs a step by its plan; gradients end in the parameters' `grad`, then SGD.

    The loss of the job is the mean of the ranks' losses; gradients are with respect to it.
    """

    def __init__(self, model: nn.Module, plan: Plan, group: Group, learning_rate: float = 1e-3) -> None:
        self.parameters = list(model.parameters())
        self.executor = Executor(plan, group, self.parameters[0].device)
        self.group, self.learning_rate = group, learning_rate

    def __call__(self, data: Sequence[Tensor], spans: list[Span] | None = None) -> Tensor:
        """The loss of this rank."""
        for parameter in self.parameters:
            parameter.grad = None  # the last step's would lie beside this one's, in no plan's memory
        with region("loss"):
            share = torch.full((), 1 / self.group.size, device=self.parameters[0].device)
        inputs = [*(parameter.detach() for parameter in self.parameters), *data, share]
        loss, *gradients = self.executor(inputs, spans)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        with region("optimizer"):
            sgd_step(self.parameters, self.learning_rate)
        return loss


def eager_gradients(model: nn.Module, data: Sequence[Tensor], group: Group) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients by plain autograd, shared ones summed one after another: what every plan must give."""
    parameters = list(model.parameters())
    loss = model(*data)
    gradients = torch.autograd.grad(loss, parameters, torch.full_like(loss, 1 / group.size))
    with torch.no_grad():
        sums = [
            gradient if getattr(parameter, "is_expert", False) else all_reduce(gradient, group)
            for parameter, gradient in zip(parameters, gradients)
        ]
    return loss.detach(), sums
