"""What a training step with stored states must give: whole weights in memory, everybody's tokens on one rank.

W tokens of all ranks, E experts, K choices a token, D model.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moebench.kernels.optimizer import AdamW
from moebench.systems.moesys.experts import AdamOptions
from moebench.workloads.conventions import Conventions
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.layer import GateSpec


class PlainSteps:
    """Steps one after another.

    Args:
        batches_WD: of tokens, used in turn; upstream_WD: the gradient of every step's result.
        dense: two weights a layer; experts: two of each expert of a layer.
        orders: of each layer, which column of a token is an expert's logit.
        products: what two weights make of rows. accumulated: batches to an update.
    """

    def __init__(
        self,
        batches_WD: Sequence[Tensor],
        upstream_WD: Tensor,
        dense: Sequence[Sequence[Tensor]],
        experts: Sequence[Sequence[Sequence[Tensor]]],
        orders: Sequence[Tensor],
        gate: GateSpec,
        conventions: Conventions,
        options: AdamOptions,
        products: Callable[[Tensor, Tensor, Tensor], Tensor],
        accumulated: int,
    ) -> None:
        self.batches_WD, self.upstream_WD, self.orders = batches_WD, upstream_WD, orders
        self.gate, self.conventions, self.products = gate, conventions, products
        self.dense = [[weight.clone().requires_grad_() for weight in layer] for layer in dense]
        self.experts = [[[w.clone().requires_grad_() for w in one] for one in layer] for layer in experts]
        weights = [w for layer in self.dense for w in layer]
        weights += [w for layer in self.experts for one in layer for w in one]
        self.adam = AdamW(weights, options.lr, options.betas, options.eps, options.weight_decay)
        self.done, self.accumulated = 0, accumulated
        self.last = (upstream_WD, upstream_WD)

    def after(self, batches: int) -> tuple[Tensor, Tensor]:
        """The result of batch number `batches`, and the gradient of its tokens, [W, D] each."""
        while self.done < batches:
            self.last = self._forward_and_backward(self.batches_WD[self.done % len(self.batches_WD)])
            self.done += 1
            if self.done % self.accumulated == 0:
                self.adam.step()
                for weight in self.adam.params:
                    weight.grad = None
        return self.last

    def _forward_and_backward(self, tokens_WD: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x_WD = tokens_WD.clone().requires_grad_()
            y_WD = x_WD
            for dense, experts, order_E in zip(self.dense, self.experts, self.orders, strict=True):
                y_WD = y_WD + self.products(y_WD, *dense)
                y_WD = y_WD + self._moe(y_WD, experts, order_E)
            y_WD.backward(self.upstream_WD)
        assert x_WD.grad is not None
        return y_WD.detach(), x_WD.grad

    def _moe(self, x_WD: Tensor, experts: Sequence[Sequence[Tensor]], order_E: Tensor) -> Tensor:
        """Every expert on all tokens, times the weight that a token gives it; one that nobody chose takes no part."""
        routing = get_gate(self.gate.name).route(x_WD[:, order_E], self.gate, self.conventions, 1.0)
        y_WD = torch.zeros_like(x_WD)
        for number, weights in enumerate(experts):
            chosen_WK = routing.experts_TK == number
            if chosen_WK.any():
                share_W1 = (routing.weights_TK * chosen_WK).sum(1, keepdim=True).to(x_WD.dtype)
                y_WD = y_WD + share_W1 * self.products(x_WD, *weights)
        return y_WD
