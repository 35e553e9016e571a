"""One training step of a layer, the same for every system: forward, backward, gradient sync, optimiser."""

import torch
from torch import Tensor

from moebench.kernels.collectives.grad_sync import GradientSync
from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.outstanding import check_finished, forget_described, outstanding
from moebench.kernels.optimizer import sgd_step
from moebench.kernels.region import region
from moebench.systems.interface import MoELayer


class TrainingStep:
    """Calling it runs one step of `layer` on this rank of `group`.

    The loss of the job is the mean of the ranks' losses. There is no loss operator: the caller gives the gradient of
    the job's loss with respect to y, that is, already divided by the number of ranks R, and the auxiliary loss enters
    with weight 1 / R. So the gradients of parameters that every rank holds are summed over the ranks, and those of
    experts (attribute `is_expert`), which have seen the tokens of all ranks, are right as they are.

    A step ends with what the layer itself does after one (`MoELayer.advance`): the state of its rule, the step number.

    Args:
        learning_rate: of plain SGD.
        stands_still: the layer works as after any step, but keeps the state and the step number that it has.
    """

    def __init__(
        self, layer: MoELayer, group: Group, learning_rate: float = 1e-3, stands_still: bool = False
    ) -> None:
        self.layer = layer
        self.group = group
        self.learning_rate = learning_rate
        self.stands_still = stands_still
        self.params = [param for param in layer.parameters() if param.requires_grad]
        self.sync = GradientSync([param for param in self.params if not getattr(param, "is_expert", False)], group)

    def __call__(self, x_TD: Tensor, upstream_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step; afterwards the gradients stand in the parameters' (and the input's) `grad`.

        Args:
            x_TD: tokens of this rank; T may be 0.
            upstream_TD: gradient of the job's loss with respect to y.

        Returns:
            y_TD and the auxiliary loss of this rank.

        Raises:
            WaitError: the layer started a collective and never waited for it.
        """
        before = outstanding()
        try:
            y_TD, aux = self._forward_backward(x_TD, upstream_TD)
            self.sync.finish()
            self.layer.advance(self.stands_still)
            check_finished(before)
        except BaseException:
            forget_described(before)
            raise
        with region("optimizer"):
            sgd_step(self.params, self.learning_rate)
        return y_TD, aux

    def _forward_backward(self, x_TD: Tensor, upstream_TD: Tensor) -> tuple[Tensor, Tensor]:
        for tensor in (*self.params, x_TD):
            if tensor.is_leaf:
                tensor.grad = None
        y_TD, aux = self.layer(x_TD)
        with region("loss"):
            outputs, gradients = [y_TD], [upstream_TD]
            if aux.requires_grad:  # a constant where the conventions leave the auxiliary loss out
                outputs.append(aux)
                gradients.append(torch.full_like(aux, 1 / self.group.size))
        torch.autograd.backward(outputs, gradients)
        return y_TD, aux
