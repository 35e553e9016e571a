"""Scaled dot-product attention as one operator: torch's own picks another program for every device and dtype.

B sequences, H query heads, G key-value heads (H a multiple of G), S positions, Z >= S positions of keys, D head size.
The queries are the last S of Z positions: a rank that holds a part of a sequence sees the keys before its part. The
implementation walks over blocks of queries, so that no more than a block's scores exist at once (FlashAttention, Dao et
al. 2022, without its tiling over keys); the backward recomputes them from the saved log-sum-exp.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_at_least, check_shape, check_tensor, check_together
from moebench.kernels.cost import Cost, Product
from moebench.kernels.define import define_operator

_BLOCK_QUERIES = 128


def attention(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, causal: bool = True, scale: float | None = None
) -> Tensor:
    """`softmax(scale * q k^T) v` for every head; differentiable in q, k, v.

    Args:
        q_BHSD: of the last S positions; k and v may have more, Z of them.
        causal: whether query s sees only positions up to its own, s + Z - S.
        scale: D^-1/2 where None.

    Raises:
        ValueError: wrong shapes, dtypes or devices, H that is no multiple of G, D of 0, fewer keys than queries.
    """
    _check(q_BHSD, k_BGSD, v_BGSD)
    return _attention(q_BHSD, k_BGSD, v_BGSD, causal, q_BHSD.shape[-1] ** -0.5 if scale is None else scale)[0]


def attention_reference(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, causal: bool = True, scale: float | None = None
) -> Tensor:
    """The definition, all scores at once."""
    _check(q_BHSD, k_BGSD, v_BGSD)
    scale = q_BHSD.shape[-1] ** -0.5 if scale is None else scale
    group, seq, keys = q_BHSD.shape[1] // k_BGSD.shape[1], q_BHSD.shape[2], k_BGSD.shape[2]
    k_BHSD, v_BHSD = (tensor.repeat_interleave(group, 1) for tensor in (k_BGSD, v_BGSD))
    scores = torch.einsum("bhsd,bhtd->bhst", q_BHSD, k_BHSD) * scale
    if causal:
        future = torch.ones(seq, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - seq)
        scores = scores.masked_fill(future, float("-inf"))
    return torch.einsum("bhst,bhtd->bhsd", scores.softmax(-1), v_BHSD)


def attention_with_scores(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool = True) -> Tensor:
    """The same in plain operators, as frameworks had it before FlashAttention: all scores are written and read again by
    each of them, and the probabilities kept for the backward.

    Raises:
        ValueError: as `attention`; another number of heads in keys and values than in queries.
    """
    _check(q_BHSD, k_BHSD, v_BHSD)
    if k_BHSD.shape[1] != q_BHSD.shape[1]:
        raise ValueError(f"q has {q_BHSD.shape[1]} heads, k has {k_BHSD.shape[1]}: must be as many")
    seq, keys = q_BHSD.shape[2], k_BHSD.shape[2]
    scores_BHSZ = torch.matmul(q_BHSD, k_BHSD.transpose(-1, -2)) * q_BHSD.shape[-1] ** -0.5
    if causal:
        future_SZ = torch.ones(seq, keys, dtype=torch.bool, device=q_BHSD.device).triu(1 + keys - seq)
        scores_BHSZ = scores_BHSZ.masked_fill(future_SZ, float("-inf"))
    return torch.matmul(scores_BHSZ.softmax(-1), v_BHSD)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_tensor("q", q, "BHSD")
    check_tensor("k", k, "BGSD")
    check_tensor("v", v, "BGSD")
    batch, heads, seq, head_size = q.shape
    check_at_least("the head size", head_size, 1)
    if not k.shape[1] or heads % k.shape[1]:
        raise ValueError(f"q has {heads} heads, k has {k.shape[1]}; the former must be a multiple of the latter")
    check_shape("k", k, (batch, k.shape[1], max(seq, k.shape[2]), head_size), "q")
    check_shape("v", v, tuple(k.shape), "k")
    for name, tensor in (("k", k), ("v", v)):
        check_together(name, tensor, "q", q)
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, q is {q.dtype}; cast one of them first")


def _blocks(seq: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """(first query, end of queries, end of the keys they see) of every block."""
    ends = [(first, min(first + _BLOCK_QUERIES, seq)) for first in range(0, seq, _BLOCK_QUERIES)]
    return [(first, end, end + keys - seq if causal else keys) for first, end in ends]


def _fold(x_BHSD: Tensor, groups: int, first: int, end: int) -> Tensor:
    """Queries first..end of the heads that share a key-value head, as the rows of one matrix: [B, G, H/G * s, D]."""
    batch, heads, _, size = x_BHSD.shape
    return x_BHSD[:, :, first:end].reshape(batch, groups, heads // groups * (end - first), size)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, first: int, end: int) -> Tensor:
    """Scores of a folded block in at least fp32, -inf where a key lies in the future: [B, G, H/G, s, keys].

    Under `causal` the last of the keys is the block's last query's own.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q, k.transpose(-1, -2)).to(wide).mul_(scale)
    scores = scores.view(*scores.shape[:2], q.shape[2] // (end - first), end - first, k.shape[2])
    if causal:
        future = torch.ones(end - first, k.shape[2], dtype=torch.bool, device=q.device)
        future.triu_(k.shape[2] - (end - first) + 1)
        scores.masked_fill_(future, float("-inf"))
    return scores


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, seq, size = q.shape
    groups = k.shape[1]
    out, lse = _fake_attention(q, k, v, causal, scale)
    for first, end, keys in _blocks(seq, k.shape[2], causal):
        scores = _scores(_fold(q, groups, first, end), k[:, :, :keys], causal, scale, first, end)
        block_lse = torch.logsumexp(scores, -1, keepdim=True)
        probs = scores.sub_(block_lse).exp_().to(v.dtype).flatten(2, 3)
        out[:, :, first:end] = torch.matmul(probs, v[:, :, :keys]).view(batch, heads, end - first, size)
        lse[:, :, first:end] = block_lse.view(batch, heads, end - first)
    return out, lse


def _torch_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, seq, size = q.shape
    groups = k.shape[1]
    grad_q = q.new_empty(q.shape)
    grad_k, grad_v = (torch.zeros(k.shape, dtype=lse.dtype, device=k.device) for _ in range(2))
    for first, end, keys in _blocks(seq, k.shape[2], causal):
        block_q, block_grad, block_out = (_fold(tensor, groups, first, end) for tensor in (q, grad, out))
        block_k, block_v = k[:, :, :keys], v[:, :, :keys]
        scores = _scores(block_q, block_k, causal, scale, first, end)
        block_lse = lse[:, :, first:end].reshape(*scores.shape[:-1], 1)
        probs = scores.sub_(block_lse).exp_().flatten(2, 3)
        # dS = P * (dP - rowsum(dO * O)), FlashAttention's equation for the softmax's backward.
        delta = (block_grad * block_out).sum(-1, keepdim=True, dtype=lse.dtype)
        grad_probs = torch.matmul(block_grad, block_v.transpose(-1, -2)).to(lse.dtype)
        grad_scores = grad_probs.sub_(delta).mul_(probs).mul_(scale).to(q.dtype)
        grad_q[:, :, first:end] = torch.matmul(grad_scores, block_k).view(batch, heads, end - first, size)
        grad_k[:, :, :keys] += torch.matmul(grad_scores.transpose(-1, -2), block_q)
        grad_v[:, :, :keys] += torch.matmul(probs.to(v.dtype).transpose(-1, -2), block_grad)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def _products(q: Tensor, k: Tensor, causal: bool, times: int) -> tuple[Product, ...]:
    """`times` products of queries by keys. A causal query sees Z - S + (S + 1) / 2 keys on average, here rounded up."""
    batch, heads, seq, size = q.shape
    seen = k.shape[2] - seq + seq // 2 + 1 if causal and seq else k.shape[2]
    return (Product(seq, seen, size, batch * heads),) * times


def _cost(out: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Cost:
    """Scores and their product with v; everything once in, once out: keys and values are re-read from the cache."""
    products = _products(q, k, causal, 2)
    return Cost(
        "product",
        flops=sum(product.flops for product in products),
        bytes_read=q.nbytes + k.nbytes + v.nbytes,
        bytes_written=sum(tensor.nbytes for tensor in out),
        products=products,
    )


def _backward_cost(
    grads: tuple[Tensor, Tensor, Tensor], grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float,
) -> Cost:
    """Five products: the scores again, then the gradients of probabilities, values, queries and keys."""
    products = _products(q, k, causal, 5)
    return Cost(
        "product",
        flops=sum(product.flops for product in products),
        bytes_read=sum(tensor.nbytes for tensor in (grad, q, k, v, out, lse)),
        bytes_written=sum(tensor.nbytes for tensor in grads),
        products=products,
    )


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, grad, _grad_lse):
    return *_attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None


_attention_backward = define_operator(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    implementation=_torch_attention_backward,
    fake=lambda grad, q, k, v, *rest: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
    cost=_backward_cost,
    is_gradient=True,
)
_attention = define_operator(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)",
    implementation=_torch_attention,
    fake=_fake_attention,
    cost=_cost,
    backward=_backward,
    setup_context=_setup_context,
)
