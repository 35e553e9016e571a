"""What stands at the ends of a model's stages: embedding, last norm, output head and loss, whole on every rank.

Every rank looks up and judges the rows that it has. The loss is the mean over a rank's rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moebench.kernels.collectives.group import Group
from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.systems.decoder.products import mark, product, turned
from moebench.workloads.models.decoder import DecoderModel


class Ends(nn.Module):
    """Embedding on the first stage; last norm, head and loss on the last. Parameters are uninitialised.

    Args:
        words: of the vocabulary, that this rank has.

    Attributes:
        tokens: the embedding, also where a tied head needs it; norm, head: None but on the last stage.
    """

    def __init__(
        self,
        model: DecoderModel,
        words: int,
        is_first: bool,
        is_last: bool,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.model = model
        like = torch.empty(0, device=device, dtype=dtype)
        sizes = (words, model.shape.d_model)
        self.tokens = nn.Parameter(like.new_empty(sizes)) if is_first or (is_last and model.tied) else None
        self.norm = nn.Parameter(like.new_empty(model.shape.d_model)) if is_last else None
        self.head = nn.Parameter(like.new_empty(sizes)) if is_last and not model.tied else None
        mark([] if self.head is None else [self.head])

    def rows(self, ids: Tensor) -> Tensor:
        """This rank's rows of ids."""
        raise NotImplementedError

    def loss(self, x_SBD: Tensor, labels: Tensor) -> Tensor:
        """Mean negative log-likelihood of the labels."""
        raise NotImplementedError


class WholeVocabulary(Ends):
    """With all V words; parameters uninitialised."""

    def __init__(
        self,
        model: DecoderModel,
        group: Group,
        is_first: bool,
        is_last: bool,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model, model.vocabulary, is_first, is_last, device, dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of ids [s, B]: [s, B, D]."""
        assert self.tokens is not None
        with region("dense"):
            return F.embedding(ids, self.tokens)

    def loss(self, x_SBD: Tensor, labels: Tensor) -> Tensor:
        """Mean negative log-likelihood of the labels [s, B], in fp32 or wider."""
        head_VD = self.tokens if self.head is None else self.head
        assert self.norm is not None
        assert head_VD is not None
        with region("dense"):
            h_TD = rms_norm(x_SBD.flatten(0, 1), self.norm, self.model.shape.eps)
            logits_TV = product(h_TD, turned(head_VD))
        with region("loss"):
            logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
            return F.nll_loss(F.log_softmax(logits_TV, dim=1), labels.reshape(-1))
