"""Checks of the embedding cut by columns on real ranks; a check returns what is wrong, in words."""

from itertools import product

import torch
import torch.nn.functional as F

from moebench.kernels.collectives.start_wait import all_gather
from moebench.kernels.region import region
from moebench.systems.moesys.embedding import HEADS, ColumnEmbedding, WholeEmbedding
from moebench.systems.moesys.embedding_volumes import EmbeddingSizes, head_bytes, lookup_bytes
from moebench.trace.recorder import Recorder
from tests.systems.megascale.sent_by import sent_by

V, D = 13, 8


def parts(rows, counts, rank):
    """What of all ranks' rows is this rank's."""
    return rows.split(counts)[rank]


def step(module, tied, ids, upstream, **counts):
    """Logits of this rank's tokens and the gradient of its table; a head of its own is a constant here."""
    with region("dense"):
        h = torch.tanh(module(ids, **counts))
    y = module.logits(h, **counts) if tied else h @ torch.linspace(-1, 1, D * V, dtype=h.dtype).view(D, V)
    y.backward(upstream)
    return y.detach(), next(module.parameters()).grad


def definition(table, tied, ids, upstream):
    """The same on one rank, with the tokens of all."""
    table = table.clone().requires_grad_()
    h = torch.tanh(F.embedding(ids, table))
    y = h @ (table.t() if tied else torch.linspace(-1, 1, D * V, dtype=h.dtype).view(D, V))
    y.backward(upstream)
    return y.detach(), table.grad


def embedding_equals_the_whole_one(group):
    """Outputs, and gradients of the whole table, tied in both ways or not; as many tokens on each rank, or not, or
    none on one; the baseline too."""
    wrong, size = [], group.size
    for counts, way in product(([3] * size, list(range(size)), [0] * size), (None, *HEADS)):
        torch.manual_seed(7)
        table = torch.randn(V, D, dtype=torch.float64)
        ids, upstream = torch.randint(V, (sum(counts),)), torch.randn(sum(counts), V, dtype=torch.float64)
        y, gradient = definition(table, way is not None, ids, upstream)
        own = [parts(rows, counts, group.index) for rows in (ids, upstream, y)]
        module = ColumnEmbedding(V, D, group, way or "auto", dtype=torch.float64)
        module.load(table)
        whole = WholeEmbedding(V, D, group, dtype=torch.float64)
        whole.load(table)
        ours = step(module, way is not None, *own[:2], counts_R=counts)
        theirs = step(whole, way is not None, *own[:2])
        whole.finish()
        pairs = {
            "y": (ours[0], own[2]),
            "gradient": (ours[1], gradient.chunk(size, 1)[group.index]),
            "baseline's y": (theirs[0], own[2]),
            "baseline's gradient": (whole.weight_VD.grad, gradient),
        }
        for name, (found, wanted) in pairs.items():
            if not torch.allclose(found, wanted, rtol=1e-11, atol=1e-12):
                wrong.append(f"{counts} {way}: {name} is off by {(found - wanted).abs().max()}")
        if size > 1 and any(counts) and not gradient.abs().sum():
            wrong.append("nothing is tested")
    return wrong


def embedding_sends_what_the_formulas_say(group):
    """Bytes of the look-up, of both heads and of the sum of a whole table's gradient; what `auto` takes sends less."""
    wrong, tokens = [], 5
    sizes = EmbeddingSizes(tokens, V, D, group.size, 8)
    ids, upstream = torch.randint(V, (tokens,)), torch.randn(tokens, V, dtype=torch.float64)

    def sent(module, tied):
        module.load(torch.randn(V, D, dtype=torch.float64))
        with Recorder([ids, upstream, *module.parameters()]) as recorder, region("dense"):
            step(module, tied, ids, upstream)
            if isinstance(module, WholeEmbedding):
                module.finish()
        return sent_by(recorder.ops, group.index)

    lookup = sum(lookup_bytes(sizes).values())
    wanted = {None: lookup} | {way: lookup + head_bytes(sizes, way) for way in HEADS}
    found = {way: sent(ColumnEmbedding(V, D, group, way or "auto", dtype=torch.float64), way is not None)
             for way in wanted}  # fmt: skip
    wrong += [f"{way}: {found[way]} bytes, not {wanted[way]}" for way in wanted if round(wanted[way]) != found[way]]
    auto = sent(ColumnEmbedding(V, D, group, dtype=torch.float64), True)
    if auto != min(found["columns"], found["gather"]):
        wrong.append(f"auto sends {auto} of {found}")
    whole = sent(WholeEmbedding(V, D, group, dtype=torch.float64), False)
    if whole != 8 * V * D * (group.size - 1):  # an all-reduce counts once for every peer, whatever carries it
        wrong.append(f"the sum of the table's gradient is one all-reduce of it; {whole} bytes")
    return wrong


def embedding_shares_the_table(group):
    """A rank holds V D / R elements, and together they are the table."""
    table = torch.randn(V, D)
    module = ColumnEmbedding(V, D, group)
    module.load(table)
    held = all_gather(module.weight_VC.detach().unsqueeze(0), group)
    wrong = [] if module.weight_VC.numel() * group.size == V * D else ["another size"]
    return wrong if torch.equal(torch.cat(list(held), 1), table) else [*wrong, "another table"]
