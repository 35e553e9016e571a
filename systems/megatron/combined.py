"""Two micro-batches at a time: the forward of one beside the backward of another, layer by layer (combined 1F1B).

Megatron's `overlap_moe_expert_parallel_comm` (core 0.16.1, `TransformerLayerSchedulePlan.run`): while rows of one
micro-batch travel to experts and back, the other one's products run:

    travels     combine's gradient | rows, then dispatch's gradient | results
    computes    attention, forward | experts, backward, then forward | attention, backward

A layer's graph is cut where rows leave and arrive, so that autograd runs each part's backward when it is told to.
Delayed (`delay_wgrad_compute`), the products of weights' gradients come after those of inputs', which leave first;
those of a stage's first attention do not wait for what goes to the stage before, as Megatron's do. Collectives have a
stream of their own as in Megatron, and share links with attention's. What Megatron puts there behind the results, their
sum by token and the residual's, is on the compute stream here, of which it is about 1 %.

The shared expert runs before the rows leave (its overlap excludes this one), and what a layer recomputes is its
activation at most: a layer in parts has no whole to run again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from moebench.kernels.collectives.start_wait import Pending
from moebench.kernels.region import region
from moebench.systems.decoder.products import postponing
from moebench.systems.decoder.recomputing import recomputing
from moebench.systems.megascale.stage import DecoderStage
from moebench.systems.megatron.decoder import MegatronDecoder, sum_of
from moebench.systems.megatron.decoder_experts import run_experts, run_shared
from moebench.systems.megatron.folded import land_combine, start_combine, start_dispatch

OVERLAPS = ("none", "combined", "delayed")


class Cut:
    """Where a graph is cut: what follows has a backward of its own.

    Attributes:
        gradient: what the backward of what follows gave; of a collective's result, still in flight.
    """

    def __init__(self, before: Tensor) -> None:
        self._edge = get_gradient_edge(before)
        self.gradient: Tensor | None = None

    @staticmethod
    def of(before: Tensor, cuts: list["Cut"]) -> Tensor:
        """The tensor for what follows; the cut is added to the list."""
        with region("dense"):  # views are taken
            cuts.append(Cut(before))
            return _Caught.apply(_NEEDS_GRADIENT, before.detach(), cuts[-1])

    @staticmethod
    def back(cuts: Sequence["Cut"]) -> None:
        """Run the backward of what comes before some cuts."""
        known = [(cut._edge, cut.gradient) for cut in cuts if cut.gradient is not None]
        torch.autograd.backward([edge for edge, _ in known], [gradient for _, gradient in known])
        for cut in cuts:
            cut.gradient = None


_NEEDS_GRADIENT = torch.zeros(0, requires_grad=True)  # a leaf keeps its values: that of a graph's part is this one


class _Caught(torch.autograd.Function):
    """The gradient is kept as it comes: one in flight must not be read."""

    @staticmethod
    def forward(ctx, leaf, x, cut):
        ctx.cut = cut
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ctx.cut.gradient = gradient
        return None, None, None


class LayerPass:
    """A micro-batch's way through a layer in three parts, forward and backward.

    Args:
        delays: whether the products of weights' gradients wait for `flush`.
    """

    def __init__(self, layer: MegatronDecoder, delays: bool) -> None:
        self.layer, self.delays = layer, delays
        self.aux: Tensor
        self.out: list[Cut] = []  # what follows the layer
        self._left: list[Cut] = []  # what follows attention: rows and weights under way
        self._beside: list[Cut] = []  # and what stays: the residual, the shared expert's results
        self._results: list[Cut] = []  # what follows the experts: results under way
        self._aux: list[Cut] = []
        self._later: list[Callable[[], None]] = []

    def attend(self, x_SBD: Tensor) -> None:
        """All until the rows leave."""
        layer = self.layer
        x_TD = layer.attended(x_SBD)
        h_TD, experts_TK, weights_TK, aux = layer.routed(x_TD)
        self.aux = Cut.of(aux, self._aux).detach()
        shared_TD = run_shared(h_TD, layer.weights, layer.mesh.tensor)
        outbound = start_dispatch(h_TD, experts_TK, weights_TK, layer.group, layer.shape.experts)
        rows, weights = (one.through(self._cut(self._left)) for one in (outbound.rows, outbound.weights))
        self._outbound = replace(outbound, rows=rows, weights=weights)
        self._residual = Cut.of(x_TD, self._beside), x_SBD.shape
        self._shared = None if shared_TD is None else Cut.of(shared_TD, self._beside)

    def run_experts(self) -> None:
        """From their arrival until the results leave."""
        layer, outbound = self.layer, self._outbound
        del self._outbound
        x_ND, weights_N = outbound.land(layer.group)
        with recomputing(layer.setting.recompute == "activation"):
            y_ND = run_experts(x_ND, outbound.ends_L, layer.weights, weights_N)
        flying = start_combine(y_ND, outbound.way, layer.group).through(self._cut(self._results))
        self._inbound: tuple[Pending, object] = flying, outbound.way

    def finish(self) -> Tensor:
        """From their arrival on: rows for the next layer."""
        (x_TD, shape), (flying, way), shared_TD = self._residual, self._inbound, self._shared
        del self._residual, self._inbound, self._shared
        y_TD = sum_of(land_combine(flying, way), shared_TD)  # type: ignore[arg-type]
        with region("dense"):
            return Cut.of((x_TD + y_TD).view(shape), self.out)

    def finish_back(self) -> None:
        """Until the gradients of the results leave."""
        Cut.back(self.out)

    def experts_back(self) -> None:
        """Until those of the rows leave."""
        self._back(self._results)

    def attend_back(self, g_aux: Tensor) -> None:
        """The rest."""
        self._aux[0].gradient = g_aux
        self._back([*self._left, *self._beside, *self._aux])

    def flush(self) -> None:
        """The products that were delayed."""
        for product in self._later:
            product()
        self._later.clear()

    def _back(self, cuts: Sequence[Cut]) -> None:
        with postponing(self._later if self.delays else None):
            Cut.back(cuts)

    @staticmethod
    def _cut(cuts: list[Cut]) -> Callable[[Tensor], Tensor]:
        return lambda link: Cut.of(link, cuts)


class StagePass:
    """A micro-batch's way through the layers of a stage and the ends of the model there.

    Args:
        balance: what a balance loss counts.
    """

    def __init__(self, stage: DecoderStage, balance: float, delays: bool) -> None:
        self.stage, self.balance = stage, balance
        self.layers = [LayerPass(layer, delays) for layer in stage.layers]  # type: ignore[arg-type]

    def begin(self, x: Tensor) -> None:
        """Up to the first layer."""
        if self.stage.is_first:
            self.stage.before("tokens")
            x = self.stage.ends.rows(x)
        self.rows = x

    def end(self, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """After the last layer: rows or the loss, and the sum of the balance losses."""
        rows = self.rows
        del self.rows
        with region("loss"):
            aux = torch.stack([layer.aux for layer in self.layers]).sum()
        if labels is None:
            return rows, aux
        self.stage.before("head")
        return self.stage.ends.loss(rows, labels), aux

    def begin_back(self, result: Tensor, gradient: Tensor | None) -> None:
        """Back to the last layer's end."""
        with region("loss", is_backward=True):
            self.g_aux = torch.full_like(self.layers[0].aux, self.balance)
            upstream = torch.ones_like(result) if gradient is None else gradient
        torch.autograd.backward(result, upstream)


class Passed(tuple[Tensor, Tensor]):
    """What a stage's forward gives, with its way there, which the backward takes back."""

    way: StagePass


def run(ahead: StagePass | None, back: StagePass | None) -> None:
    """The layers of a forward, of a backward, or of both beside each other."""
    ahead_of = ahead.layers if ahead else []
    back_of = list(reversed(back.layers)) if back else []
    if back_of:
        back_of[0].finish_back()
    for number, (f, b, following) in enumerate(zip_longest(ahead_of, back_of, back_of[1:])):
        if f is not None and ahead is not None:
            ahead.stage.before(str(number))
            f.attend(ahead.rows)
        if b is not None:
            b.experts_back()
            b.flush()
        if f is not None:
            f.run_experts()
        if b is not None and back is not None:
            b.attend_back(back.g_aux)
            if following is not None:  # whose gradients leave before this layer's delayed products and the results' end
                following.finish_back()
            b.flush()
        if f is not None and ahead is not None:
            ahead.rows = f.finish()
