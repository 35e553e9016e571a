"""What ranks run in test_megatron.py and test_megatron_losses.py; apart, so that a rank does not import pytest."""

from dataclasses import replace

import torch

from moebench.systems.megatron import losses
from moebench.systems.megatron.layer import MegatronLayer, Setting
from moebench.workloads.conventions import COMMON
from moebench.workloads.layer import GateSpec, LayerWorkload

CPU = torch.device("cpu")
TOKENS = 5


def rows_are_sorted(group, layout):
    """Rows that carry (rank, token) arrive by expert, rank, token, with the weight that the router gave."""
    workload = LayerWorkload(GateSpec("topk", 2), 1, TOKENS, 16, 8, 2 * group.size)
    for dispatcher in ("alltoall", "allgather"):
        conventions = replace(COMMON, capacity_rule="unlimited")
        torch.manual_seed(3)  # the same router everywhere
        layer = MegatronLayer(workload, group, conventions, CPU, torch.float32, Setting(dispatcher, layout))
        torch.manual_seed(group.rank)
        x_TD = torch.randn(TOKENS, 16)
        x_TD[:, 0], x_TD[:, 1] = float(group.rank), torch.arange(TOKENS).float()
        routes, capacity, _ = layer.route(x_TD)
        found = layer.dispatcher.dispatch(x_TD, routes, capacity)
        own = slice(2 * group.rank, 2 * group.rank + 2)
        maps = [torch.zeros_like(routes.map_TE) for _ in range(group.size)]
        weights = [torch.zeros_like(routes.weights_TE) for _ in range(group.size)]
        torch.distributed.all_gather(maps, routes.map_TE)
        torch.distributed.all_gather(weights, routes.weights_TE.detach())
        wanted = [
            (rank, token, float(weights[rank][token, expert]))
            for expert in range(own.start, own.stop)
            for rank in range(group.size)
            for token in range(TOKENS)
            if maps[rank][token, expert]
        ]
        rows = [(int(row[0]), int(row[1]), float(w)) for row, w in zip(found.x_ND, found.weights_N)]
        assert rows == wanted, (dispatcher, rows, wanted)
        counts = [sum(int(m[:, expert].sum()) for m in maps) for expert in range(own.start, own.stop)]
        assert found.ends_L.tolist() == torch.tensor(counts).cumsum(0).tolist()


def global_loss_of_a_rank(group, seed, coefficient):
    """The loss, and the gradient of the mean of the ranks' losses with respect to this rank's logits."""
    torch.manual_seed(seed)
    logits = torch.randn(group.size, 12, 6, dtype=torch.float64)[group.rank].requires_grad_()
    loss = losses.global_loss(*losses.scores_and_map(logits, 2, False), 2, coefficient, group)
    (loss / group.size).backward()
    return loss.detach(), logits.grad
