"""A pipeline stage of a model on the ranks of one node: some of its layers, and at its ends embedding, head and loss.

Every rank has its own rows of all sequences (attention `dp`: sequences of its own). What stands at the ends is whole on
every rank, which does it for its rows (`ends.WholeVocabulary`), or cut by the vocabulary (Megatron's).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.region import region
from moebench.systems.megascale.ends import Ends, WholeVocabulary
from moebench.systems.megascale.layer import DecoderLayer
from moebench.workloads.errors import InputError
from moebench.workloads.models.decoder import DecoderModel

# Makes a layer: (shape, sequence, batch, group, device=..., dtype=...), such as `ListedLayer` or a partial of one.
MakeLayer = Callable[..., nn.Module]
# Makes the ends: (model, group, is_first, is_last, device, dtype); `rows(ids)` and `loss(rows, labels)` of a rank.
MakeEnds = Callable[..., Ends]


def problem(model: DecoderModel) -> str | None:
    """What the model has and the layer here has not; None when nothing."""
    missing = ", ".join(model.not_expressed)
    return f"model {model.name}: the layer here has no {missing}" if missing else None


def tie_problem(model: DecoderModel, stages: int) -> str | None:
    """Why the model can't be cut into so many stages or chunks: nobody sums the gradients of two embeddings."""
    if model.tied and stages > 1:
        return f"model {model.name}: its head is its embedding, which stages x chunks = {stages} would have twice"
    return None


class DecoderStage(nn.Module):
    """Layers of a model; parameters uninitialised.

    `forward(x)` takes ids on the first stage, else rows [s, B, D]; it gives rows, or with the labels on the last stage
    the loss, and beside it the sum of the layers' auxiliary losses. Ids and labels are [s, B], of this rank's rows, or
    what `ends` takes.

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
        ends: MakeEnds = WholeVocabulary,
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
        self.ends = ends(model, group, is_first, is_last, device, dtype)
        self.layers = nn.ModuleList(
            make(model.shape, sequence, batch, group, device=device, dtype=dtype) for _ in range(layers)
        )

    def forward(self, x: Tensor, labels_SB: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One micro-batch through the stage.

        Raises:
            ValueError: labels are missing on the last stage, or given to another.
        """
        if (labels_SB is not None) != self.is_last:
            raise ValueError("the last stage takes labels, and no other")
        if self.is_first:
            self.before("tokens")
            x = self.ends.rows(x)
        losses = []
        for number, layer in enumerate(self.layers):
            self.before(str(number))
            x, aux = layer(x)
            losses.append(aux)
        with region("loss"):
            aux = torch.stack(losses).sum()
        if labels_SB is None:
            return x, aux
        self.before("head")
        return self.ends.loss(x, labels_SB), aux

    def before(self, part: str) -> None:
        """Called before the weights of `tokens`, of a layer by its number, or of `head` and last norm are used."""
