"""The ends of a model whose vocabulary is cut among tensor-parallel ranks, as Megatron cuts it.

A rank has V / t rows of embedding and head. It looks up those of its group's ids that it has, and a reduce-scatter sums
and deals out the rows; before the head rows are gathered, and the softmax over all of V takes three small exchanges.
Ids and labels are those of all positions of the group's sequences. The loss is the mean over these.

W tokens of a tensor-parallel group, V vocabulary, U = V / t words of a rank, D model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_gather, all_reduce, start_reduce_scatter
from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.systems.decoder.products import turned
from moebench.systems.megascale.ends import Ends
from moebench.systems.megatron.linears import column_product
from moebench.systems.megatron.mesh import mesh_of
from moebench.workloads.errors import InputError
from moebench.workloads.models.decoder import DecoderModel


class ParallelVocabulary(Ends):
    """With this rank's U words; parameters uninitialised.

    Raises:
        InputError: a vocabulary that the tensor-parallel ranks can't divide.
    """

    def __init__(
        self,
        model: DecoderModel,
        group: Group,
        is_first: bool,
        is_last: bool,
        device: torch.device | str,
        dtype: torch.dtype,
        tensor_parallel: int,
    ) -> None:
        if model.vocabulary % tensor_parallel:
            raise InputError(
                f"vocabulary = {model.vocabulary} is not divisible by tensor_parallel = {tensor_parallel}"
            )
        words = model.vocabulary // tensor_parallel
        super().__init__(model, words, is_first, is_last, device, dtype)
        self.words, self.group = words, mesh_of(group, tensor_parallel).tensor

    def rows(self, ids: Tensor) -> Tensor:
        """This rank's rows [S / t, B, D] of the ids [S, B] of all positions."""
        assert self.tokens is not None
        with region("dense"):
            own_SB = ids - self.group.index * self.words
            places_SB = own_SB.clamp(0, self.words - 1)
            x_SBD = F.embedding(places_SB, self.tokens)
            if self.group.size > 1:
                x_SBD = x_SBD.masked_fill((places_SB != own_SB).unsqueeze(2), 0)
        with region("exchange"):
            return start_reduce_scatter(x_SBD, self.group).wait()

    def loss(self, x_SBD: Tensor, labels: Tensor) -> Tensor:
        """Mean negative log-likelihood of the labels [S, B] of all positions, in fp32 or wider."""
        head_UD = self.tokens if self.head is None else self.head
        assert self.norm is not None
        assert head_UD is not None
        with region("dense"):
            h_TD = rms_norm(x_SBD.flatten(0, 1), self.norm, self.model.shape.eps)
            logits_WU = column_product(h_TD, turned(head_UD), self.group)
        with region("loss"):
            own_W = labels.reshape(-1) - self.group.index * self.words
            return _Loss.apply(logits_WU, own_W, self.group).mean()


class _Loss(torch.autograd.Function):
    """`vocab_parallel_cross_entropy`: of each token; the probabilities are made in place and kept."""

    @staticmethod
    def forward(ctx, logits_WU, own_W, group):
        ctx.dtype, words = logits_WU.dtype, logits_WU.shape[1]
        scores_WU = logits_WU.to(torch.promote_types(logits_WU.dtype, torch.float32))
        most_W = scores_WU.amax(1)
        with region("exchange"):
            most_RW = all_gather(most_W, group).view(group.size, -1)
        scores_WU = scores_WU - most_RW.amax(0).unsqueeze(1)
        place_W1 = own_W.clamp(0, words - 1).unsqueeze(1)
        is_here_W1 = place_W1 == own_W.unsqueeze(1)
        picked_W = scores_WU.gather(1, place_W1).masked_fill(is_here_W1.logical_not(), 0).squeeze(1)
        probs_WU = scores_WU.exp_()
        with region("exchange"):
            sums = all_reduce(torch.stack([picked_W, probs_WU.sum(1)]), group)
        probs_WU.div_(sums[1].unsqueeze(1))
        ctx.save_for_backward(probs_WU, place_W1, is_here_W1)
        return sums[1].log() - sums[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_W):
        probs_WU, place_W1, is_here_W1 = ctx.saved_tensors
        grad_WU = probs_WU.scatter_add_(1, place_W1, -is_here_W1.to(probs_WU.dtype))
        return grad_WU.mul_(grad_W.unsqueeze(1)).to(ctx.dtype), None, None
