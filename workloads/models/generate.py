"""Text from a GPT-2 with Mixture-of-Experts layers on one rank: keys and values of all positions are kept.

Everything but the experts is the rank's own; its sequences are others than those of other ranks.

B sequences, S positions at once (the prompt's, then one), Z positions that are kept, D model, H heads, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moebench.kernels.attention import attention
from moebench.kernels.region import region
from moebench.workloads.models.gpt2_moe import Block, GPT2MoE
from moebench.workloads.models.moe import MoE


class Generation:
    """A model that generates again and again, B sequences at a time.

    Args:
        has_scores: whether attention writes its scores and reads them again, as before FlashAttention.

    Attributes:
        kept: keys and values of each layer, [2, B, H, Z, D / H].
    """

    def __init__(self, model: GPT2MoE, batch_size: int, positions: int, has_scores: bool = False) -> None:
        shape = model.shape
        self.model, self.batch_size, self.has_scores = model, batch_size, has_scores
        sizes = (2, batch_size, shape.heads, positions, shape.d_model // shape.heads)
        self.kept = [torch.empty(sizes, device=self._like.device, dtype=self._like.dtype) for _ in range(shape.layers)]

    @property
    def _like(self) -> Tensor:
        return self.model.tokens.weight

    def run(self, prompt_BS: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """So many tokens [B, tokens] behind a prompt, the most probable ones, and the last logits [B, V]."""
        ids_BS, found, first = prompt_BS, [], 0
        for _ in range(tokens):
            logits_BV = self._logits(ids_BS, first)
            first += ids_BS.shape[1]
            with region("dense"):
                ids_BS = logits_BV.argmax(1, keepdim=True)
            found.append(ids_BS)
        with region("dense"):
            return torch.cat(found, 1), logits_BV

    @torch.no_grad()
    def _logits(self, ids_BS: Tensor, first: int) -> Tensor:
        """Of the last position; the ids are those from `first` on."""
        batch, positions = ids_BS.shape
        with region("dense"):
            x_BSD = self.model.tokens(ids_BS) + self.model.places.weight[first : first + positions]
            x_TD = x_BSD.flatten(0, 1)
        for block, kept in zip(self.model.blocks, self.kept, strict=True):
            assert isinstance(block, Block)
            if isinstance(block.ffn, MoE):
                block.ffn.shape = replace(block.ffn.shape, batch_size=batch, sequence=positions)  # that of its slots
            with region("attention"):
                x_TD = x_TD + self._attended(block, x_TD, kept, (batch, positions), first)
            x_TD = block.feed(x_TD)
        with region("dense"):
            last_BD = x_TD.view(batch, positions, -1)[:, -1]
            return self.model.tokens.logits(self.model.norm(last_BD))

    def _attended(self, block: Block, x_TD: Tensor, kept: Tensor, rows: tuple[int, int], first: int) -> Tensor:
        heads, (_, positions) = self.model.shape.heads, rows
        own = block.attention
        qkv_3BHSD = own.qkv(block.norm1(x_TD)).view(*rows, 3, heads, -1).permute(2, 0, 3, 1, 4)
        kept[:, :, :, first : first + positions] = qkv_3BHSD[1:]
        k, v = kept[:, :, :, : first + positions].unbind(0)
        y_BHSD = (_attention_by_products if self.has_scores else attention)(qkv_3BHSD[0], k, v)
        return own.out(y_BHSD.transpose(1, 2).reshape(x_TD.shape))


def _attention_by_products(q_BHSD: Tensor, k_BHZD: Tensor, v_BHZD: Tensor) -> Tensor:
    """Two products of a library around a softmax: no pass over the scores for the scale, nor for the mask, which only
    several queries need.
    """
    (*heads, queries, size), keys = q_BHSD.shape, k_BHZD.shape[2]
    q, k, v = (one.reshape(-1, *one.shape[2:]) for one in (q_BHSD, k_BHZD, v_BHZD))
    mask_SZ = q.new_zeros(1, 1)
    if queries > 1:
        mask_SZ = q.new_full((queries, keys), float("-inf")).triu(1 + keys - queries)
    scores = torch.baddbmm(mask_SZ, q, k.transpose(1, 2), alpha=size**-0.5)
    return torch.bmm(scores.softmax(2), v).view(*heads, queries, size)
