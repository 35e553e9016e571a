"""An optimiser whose state is divided among d replicas (ZeRO), over gradients that are summed in one of three ways.

A rank has all N parameters in their dtype and N FP32 gradients, in which it adds up its micro-batches; of FP32 masters
and of Adam's two moments it has N / d each. A step sums the gradients, updates the shard, and gathers the parameters.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import start_all_gather
from moebench.kernels.optimizer import AdamW
from moebench.kernels.region import region
from moebench.systems.megascale.gradients import add_gradients, padded_size, reduce_gradients
from moebench.systems.megascale.parameters import gather_parameters, padded_share


class ShardedAdamW:
    """Adam over parameters that every replica holds; all of one dtype, on one device.

    Attributes:
        gradients_N: FP32, of all parameters one after another; the last ones are padding.
        master: this rank's [N / d] parameters in FP32.

    Args:
        way: one of `gradients.WAYS`.
        parameters: how new ones travel, one of `parameters.WAYS`; None: in their dtype.

    Raises:
        ValueError: no parameters, or several dtypes or devices.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        group: Group,
        way: str = "bf16-all-to-all",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        parameters: str | None = None,
    ) -> None:
        self.params, self.group, self.way, self.parameters = list(params), group, way, parameters
        kinds = {(param.dtype, param.device) for param in self.params}
        if len(kinds) != 1:
            raise ValueError(f"parameters of one dtype on one device are needed; got {len(kinds)} kinds")
        ((self.dtype, device),) = kinds
        total = sum(param.numel() for param in self.params)
        size = padded_size(total, group.size) if parameters is None else padded_share(total, group.size) * group.size
        self.gradients_N = torch.zeros(size, device=device)
        flat = torch.cat([param.detach().reshape(-1).float() for param in self.params])
        flat = torch.cat([flat, flat.new_zeros(size - total)])
        self.master = flat.chunk(group.size)[group.index].clone().requires_grad_()
        self.adam = AdamW([self.master], lr, betas, weight_decay=weight_decay)

    @property
    def state_bytes(self) -> int:
        """Of masters and moments on this rank: 12 N / d."""
        return sum(one.nbytes for one in (self.master, *self.adam.averages, *self.adam.squares))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the parameters' gradients of a micro-batch, in FP32, and let them go."""
        with region("grad-sync"):
            add_gradients(self.params, self.gradients_N)

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Sum the replicas' gradients, times `scale`; update; gather the parameters. All replicas must call it."""
        with region("grad-sync"):
            self.master.grad = reduce_gradients(self.gradients_N, self.group, self.way) * scale
            self.gradients_N.zero_()
        with region("optimizer"):
            self.adam.step()
            self.master.grad = None
            shard = self.master.detach() if self.parameters else self.master.detach().to(self.dtype)
        with region("grad-sync"):
            if self.parameters is None:
                flat = start_all_gather(shard, self.group).wait()
            else:
                flat = gather_parameters(shard, self.group, self.parameters)
            for param, part in zip(self.params, flat.split([*(p.numel() for p in self.params), self._padding()])):
                param.copy_(part.view(param.shape))

    def _padding(self) -> int:
        return len(self.gradients_N) - sum(param.numel() for param in self.params)
