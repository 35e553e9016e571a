"""What generation should give, by the definition: one rank with all experts, every token computed anew at every step.

Tokens that a pass takes together queue for the experts' slots together: the prompt's, then one of each sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.attention import attention_reference
from moebench.kernels.collectives.group import described_group
from moebench.workloads.models.gpt2_moe import Block, GPT2MoE
from moebench.workloads.models.moe import MoE
from moebench.workloads.models.shape import GPT2MoEShape


@torch.no_grad()
def logits_by_definition(
    shape: GPT2MoEShape, device: torch.device, seed: int, ids_BS: Tensor, tokens_BG: Tensor
) -> list[Tensor]:
    """Logits [B, V] behind the prompt and behind each further token but the last, in float64.

    Args:
        shape: with a rank's prompts as its batch. seed: of the weights.
    """
    model = GPT2MoE(shape, described_group(1), device, torch.float64, seed)
    prompt, found = ids_BS.shape[1], []
    for more in range(tokens_BG.shape[1]):
        ids_BZ = torch.cat([ids_BS, tokens_BG[:, :more]], 1)
        x_BZD = model.tokens(ids_BZ) + model.places.weight[: ids_BZ.shape[1]]
        for block in model.blocks:
            assert isinstance(block, Block)
            x_BZD = _block(block, x_BZD, prompt)
        found.append(model.norm(x_BZD[:, -1]) @ model.tokens.weight.t())
    return found


def _block(block: Block, x_BZD: Tensor, prompt: int) -> Tensor:
    heads = block.attention.shape.heads
    qkv = block.attention.qkv(block.norm1(x_BZD)).chunk(3, 2)
    q, k, v = (one.unflatten(2, (heads, -1)).transpose(1, 2) for one in qkv)
    x_BZD = x_BZD + block.attention.out(attention_reference(q, k, v).transpose(1, 2).flatten(2))
    h_BZD = block.norm2(x_BZD)
    if not isinstance(block.ffn, MoE):
        return x_BZD + block.ffn(h_BZD)
    together = [h_BZD[:, :prompt], *(h_BZD[:, place : place + 1] for place in range(prompt, h_BZD.shape[1]))]
    return x_BZD + torch.cat([_experts(block.ffn, one.flatten(0, 1)).view(one.shape) for one in together], 1)


def _experts(layer: MoE, h_TD: Tensor) -> Tensor:
    """Route by route, in the order of the queue: all first choices, then all second ones."""
    shape, y_TD = layer.shape, torch.zeros_like(h_TD)
    weights_TE = (h_TD.float() @ layer.router_ED.float().t()).softmax(1)
    weights_TK, experts_TK = weights_TE.topk(shape.gate.top_k, 1)
    capacity = shape.conventions.capacity(len(h_TD), shape.experts, shape.gate.top_k, shape.capacity_factor)
    queued = [0] * shape.experts
    activate = torch.relu if shape.activation == "relu" else F.gelu
    for choice in range(shape.gate.top_k):
        for token, expert in enumerate(experts_TK[:, choice].tolist()):
            queued[expert] += 1
            if queued[expert] > capacity:
                continue
            hidden_F = activate(h_TD[token] @ layer.w1_LDF[expert] + layer.b1_LF[expert])
            y_TD[token] += weights_TK[token, choice] * (hidden_F @ layer.w2_LFD[expert] + layer.b2_LD[expert])
    return y_TD
