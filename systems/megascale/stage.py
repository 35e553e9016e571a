"""A pipeline stage of a model on the ranks of one node: some of its layers, and at its ends embedding, head and loss.

Every rank has its own rows of all sequences (attention `dp`: sequences of its own), so that embedding, last norm, head
and loss are each rank's for its rows; their weights are whole on every rank. The loss is the mean over a rank's rows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.systems.megascale.layer import DecoderLayer
from moebench.workloads.errors import InputError
from moebench.workloads.models.decoder import DecoderModel

# Makes a layer: (shape, sequence, batch, group, device=..., dtype=...), such as `ListedLayer` or a partial of one.
MakeLayer = Callable[..., DecoderLayer]


def problem(model: DecoderModel) -> str | None:
    """What the model has and the layer here has not; None when nothing."""
    missing = ", ".join(model.not_expressed)
    return f"model {model.name}: the layer here has no {missing}" if missing else None


class DecoderStage(nn.Module):
    """Layers of a model; parameters uninitialised.

    `forward(x)` takes ids [s, B] on the first stage, else rows [s, B, D]; it gives rows, or with the labels [s, B] on
    the last stage the loss, and beside it the sum of the layers' auxiliary losses.

    Args:
        layers: how many.
        sequence, batch: S and B of whole sequences.

    Raises:
        InputError: the layer can't run the model, no layers, more than the model has, or what `make` refuses.
    """

    def __init__(
        self,
        model: DecoderModel,
        layers: int,
        sequence: int,
        batch: int,
        group: Group,
        is_first: bool = True,
        is_last: bool = True,
        make: MakeLayer = DecoderLayer,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        reason = problem(model)
        if reason is not None:
            raise InputError(reason)
        if not 1 <= layers <= model.layers:
            raise InputError(f"layers = {layers}: the model {model.name} has {model.layers}, a stage at least one")
        self.model, self.is_first, self.is_last = model, is_first, is_last
        like = torch.empty(0, device=device, dtype=dtype)
        sizes = (model.vocabulary, model.shape.d_model)
        self.tokens = nn.Parameter(like.new_empty(sizes)) if is_first or (is_last and model.tied) else None
        self.layers = nn.ModuleList(
            make(model.shape, sequence, batch, group, device=device, dtype=dtype) for _ in range(layers)
        )
        self.norm = nn.Parameter(like.new_empty(model.shape.d_model)) if is_last else None
        self.head = nn.Parameter(like.new_empty(sizes)) if is_last and not model.tied else None

    def forward(self, x: Tensor, labels_SB: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One micro-batch through the stage.

        Raises:
            ValueError: labels are missing on the last stage, or given to another.
        """
        if (labels_SB is not None) != self.is_last:
            raise ValueError("the last stage takes labels, and no other")
        if self.is_first:
            assert self.tokens is not None
            self.before("tokens")
            with region("dense"):
                x = F.embedding(x, self.tokens)
        losses = []
        for number, layer in enumerate(self.layers):
            self.before(str(number))
            x, aux = layer(x)
            losses.append(aux)
        with region("loss"):
            aux = torch.stack(losses).sum()
        return (x if labels_SB is None else self.loss(x, labels_SB)), aux

    def before(self, part: str) -> None:
        """Called before the weights of `tokens`, of a layer by its number, or of `head` and last norm are used."""

    def loss(self, x_SBD: Tensor, labels_SB: Tensor) -> Tensor:
        """Mean negative log-likelihood of the labels, in fp32 or wider."""
        assert self.norm is not None
        head_VD = self.tokens if self.head is None else self.head
        assert head_VD is not None
        self.before("head")
        with region("dense"):
            h_TD = rms_norm(x_SBD.flatten(0, 1), self.norm, self.model.shape.eps)
            logits_TV = torch.mm(h_TD, head_VD.t())
        with region("loss"):
            logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
            return F.nll_loss(F.log_softmax(logits_TV, dim=1), labels_SB.reshape(-1))
