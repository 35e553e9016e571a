"""Sums over nodes on real ranks; a check returns what is wrong, in words."""

import torch

from moebench.kernels.region import region
from moebench.systems.megascale.sync import sum_over_nodes
from moebench.trace.recorder import Recorder


def sums_over_nodes_are_sums(group):
    """The same on every rank, in one chunk and in three; bytes inside a node and between nodes; phases overlap."""
    ranks, inside, nodes = group.size, group.nodes.per_node, group.nodes.count
    wrong = []
    for chunks, size in ((1, 4 * ranks), (3, 12 * ranks), (2, 0)):
        torch.manual_seed(8)
        all_RP = torch.randn(ranks, size, dtype=torch.float64)
        own = all_RP[group.index].clone()
        with Recorder([own]) as recorder, region("grad-sync"):
            found = sum_over_nodes(own, group, chunks)
        if not torch.allclose(found, all_RP.sum(0), rtol=1e-12, atol=1e-12):
            wrong.append(f"{chunks} chunks: {(found - all_RP.sum(0)).abs().max()}")
        sent = {"node": 0, "rail": 0}
        for op in recorder.ops:
            if op.collective is not None:
                sent[op.collective.group] += op.collective.bytes_per_peer * (len(op.collective.ranks) - 1)
        wanted = {"node": 16 * size * (inside - 1) // inside, "rail": 16 * size * (nodes - 1) // (nodes * inside)}
        if sent != wanted:
            wrong.append(f"{chunks} chunks: {sent} bytes, not {wanted}")
        ends = {start: op.index for op in recorder.ops for start in op.waits_on}
        inside_others = [
            op
            for op in recorder.ops
            if op.collective is not None
            and any(one.collective is not None for one in recorder.ops[op.index + 1 : ends[op.index]])
        ]
        if chunks > 1 and nodes > 1 and size and len(inside_others) < 4 * (chunks - 1):
            wrong.append(f"{chunks} chunks: only {len(inside_others)} phases overlap with another chunk's")
    return wrong
