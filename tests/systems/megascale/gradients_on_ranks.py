"""Checks of gradients, FP8 rows and the sharded optimiser on real ranks; a check returns what is wrong, in words."""

import torch

from moebench.kernels.collectives.start_wait import all_gather
from moebench.kernels.optimizer import AdamW
from moebench.kernels.region import region
from moebench.systems.megascale.fp8_exchange import reduce_scatter_fp8
from moebench.systems.megascale.gradients import BF16_ROUNDING, WAYS, narrow_in_place, padded_size, reduce_gradients
from moebench.systems.megascale.sharded import ShardedAdamW
from moebench.trace.recorder import Recorder
from tests.systems.megascale.sent_by import sent_by

FP32_ROUNDING = 2.0**-24


def sums_are_within_their_errors(group):
    """Each way's stated error against float64, its bytes, no second buffer; only the ring's error grows with d."""
    size, replicas = padded_size(5000, group.size), group.size
    torch.manual_seed(5)
    all_DN = torch.randn(replicas, size) * 10.0 ** torch.randint(-6, 3, (replicas, size))
    exact_N, magnitude_N = all_DN.double().sum(0), all_DN.double().abs().sum(0)
    own = slice(group.index * size // replicas, (group.index + 1) * size // replicas)
    roundings = {"fp32-reduce-scatter": 0, "bf16-all-to-all": 1, "bf16-ring": replicas}
    wrong, worst = [], {}
    for way in WAYS:
        buffer_N = all_DN[group.index].clone()
        with Recorder([buffer_N]) as recorder, region("grad-sync"):
            shard = reduce_gradients(buffer_N, group, way)
        sent, peak = sent_by(recorder.ops, group.index), recorder.peak_bytes
        if replicas == 1:
            roundings[way] = 0
        bound = (roundings[way] * BF16_ROUNDING * (1 + BF16_ROUNDING) + replicas * FP32_ROUNDING) * magnitude_N[own]
        error = (shard.double() - exact_N[own]).abs()
        worst[way] = (error / magnitude_N[own]).max().item()
        if not bool((error <= bound).all()):
            wrong.append(f"{way}: off by {(error / bound).max().item()} of what is stated")
        element = 4 if way == "fp32-reduce-scatter" else 2
        if sent != element * size * (replicas - 1) // replicas:
            wrong.append(f"{way}: {sent} bytes of {size} elements")
        beside = peak - 4 * size
        if way == "bf16-all-to-all" and beside > 4 * 1024:
            wrong.append(f"{way}: {beside} bytes besides")
    if replicas == 4 and not worst["bf16-all-to-all"] < worst["bf16-ring"]:
        wrong.append(f"the ring should be worse: {worst}")
    odd = torch.randn(2 * 3000)
    if not torch.equal(narrow_in_place(odd.clone()), odd.bfloat16()):
        wrong.append("narrowing in place is another rounding")
    return wrong


def fp8_is_within_its_error(group):
    """Sums and gradients within what is stated, groups of 128 tokens that are full and that are not; half the bytes."""
    wrong, ranks, columns = [], group.size, 24
    for tokens in (128, 5, 0):
        torch.manual_seed(6)
        all_RWD = torch.randn(ranks, ranks * tokens, columns) * torch.rand(ranks, ranks * tokens, 1) ** 4
        upstream_RTD = torch.randn(ranks, tokens, columns)
        own = slice(group.index * tokens, (group.index + 1) * tokens)
        x = all_RWD[group.index].clone().requires_grad_()
        with Recorder([x, upstream_RTD]) as recorder, region("exchange"):
            y = reduce_scatter_fp8(x, group)
        exact = all_RWD[:, own].double().sum(0)
        amax = all_RWD[:, own].abs().amax(2, keepdim=True).double() if tokens else torch.zeros(ranks, 0, 1)
        bound = (all_RWD[:, own].double().abs() / 16 + amax * 2**-10 / 448 + 1e-6).sum(0)
        if not bool(((y.double() - exact).abs() <= bound).all()):
            wrong.append(f"{tokens} tokens: the sums")
        if ranks > 1 and sent_by(recorder.ops, group.index) != (ranks - 1) * tokens * (columns + 4):
            wrong.append(f"{tokens} tokens: {sent_by(recorder.ops, group.index)} bytes")
        y.backward(upstream_RTD[group.index])
        wanted = upstream_RTD.flatten(0, 1).double()
        largest = wanted.abs().max() if tokens else 0
        if not bool(((x.grad.double() - wanted).abs() <= wanted.abs() / 16 + largest * 2**-10 / 448 + 1e-6).all()):
            wrong.append(f"{tokens} tokens: the gradients")
    return wrong


def sharded_adam_is_adam(group):
    """Three steps of two micro-batches as on one rank with all gradients; 12 N / d bytes of state."""
    torch.manual_seed(7)
    whole = [torch.randn(13, 3), torch.randn(7)]
    wrong = []
    for way, close in (("fp32-reduce-scatter", 1e-6), ("bf16-all-to-all", 2e-3)):
        params = [one.clone().requires_grad_() for one in whole]
        plain = [one.clone().requires_grad_() for one in whole]
        sharded, adam = ShardedAdamW(params, group, way, lr=0.01), AdamW(plain, lr=0.01)
        for _ in range(3):
            sums = [torch.zeros_like(one) for one in whole]
            for _ in range(2):
                grads = [torch.randn(group.size, *one.shape) for one in whole]
                for param, total, grad in zip(params, sums, grads):
                    param.grad = grad[group.index].clone()
                    total += grad.sum(0)
                sharded.accumulate()
            for param, total in zip(plain, sums):
                param.grad = total / group.size
            adam.step()
            sharded.step(1 / group.size)
        for ours, theirs in zip(params, plain):
            if not torch.allclose(ours, theirs, atol=close, rtol=0):
                wrong.append(f"{way}: off by {(ours - theirs).abs().max()}")
            copies = all_gather(ours.detach().unsqueeze(0), group)
            if not all(torch.equal(copy, copies[0]) for copy in copies):
                wrong.append(f"{way}: replicas differ")
        if sharded.state_bytes != 12 * padded_size(46, group.size) // group.size:
            wrong.append(f"{way}: {sharded.state_bytes} bytes of state")
    return wrong
