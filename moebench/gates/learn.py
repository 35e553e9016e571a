"""A short real training of one layer on a task that needs experts: plain autograd, Adam, one process.

T tokens of a step, D model.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.systems.reference import ReferenceLayer
from moebench.workloads.clustered import Batch, ClusteredTask
from moebench.workloads.routing import Routing

LEARNING_RATE = 1e-2
AUXILIARY = 0.01  # weight of the auxiliary loss beside the task's


@dataclass(frozen=True)
class Moment:
    """One step of a training, before its update.

    Attributes:
        loss: of the task: the mean square of layer(x) - target.
    """

    step: int
    loss: float
    routing: Routing


def train(
    layer: ReferenceLayer, task: ClusteredTask, steps: int, watch: Callable[[Moment], None] = lambda moment: None
) -> None:
    """Train `layer` for so many steps of its workload's tokens.

    Args:
        watch: is shown every step.
    """
    optimizer = torch.optim.Adam(layer.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        loss, aux, routing = forward(layer, task.batch(layer.workload.tokens))
        watch(Moment(step, float(loss.detach()), routing))
        optimizer.zero_grad()
        (loss + AUXILIARY * aux).backward()
        layer.advance()
        optimizer.step()


def forward(layer: ReferenceLayer, batch: Batch) -> tuple[Tensor, Tensor, Routing]:
    """The task's loss, the auxiliary loss, and where the tokens went."""
    take_ids(layer, batch)
    y_TD, aux, routing = layer.routed(batch.x_TD)
    return (y_TD - batch.target_TD).square().mean(), aux, routing


def take_ids(layer: ReferenceLayer, batch: Batch) -> None:
    """Tell a layer that routes by token ids those of a batch."""
    if layer.token_ids_T is not None:
        layer.token_ids_T = batch.token_ids_T


def consistency(layer: ReferenceLayer, batch: Batch, clusters: int) -> float:
    """Share of the routes that go to the experts which their cluster uses most.

    A cluster is granted its share of the experts, E / C, or K where that is more: by chance about that number over E.
    """
    workload = layer.workload
    granted = max(workload.gate.top_k, workload.experts // clusters)
    take_ids(layer, batch)
    with torch.no_grad():
        experts_TK = layer.route(batch.x_TD).experts_TK
    favourite = routes = 0
    for cluster in range(clusters):
        used = Counter(e for e in experts_TK[batch.cluster_T == cluster].reshape(-1).tolist() if e >= 0)
        favourite += sum(times for _, times in used.most_common(granted))
        routes += used.total()
    return favourite / max(routes, 1)
