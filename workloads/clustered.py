"""A task that needs experts: tokens come in clusters, and each cluster should undergo a linear map of its own.

Small enough for a CPU, and no expert alone can serve two clusters: a layer learns it only if its router comes to give
the tokens of a cluster to experts of their own.

T tokens of a batch, C clusters, D model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DISTANCE, SPREAD = 3.0, 0.5  # of a cluster's centre from the origin, of its tokens around it


@dataclass(frozen=True)
class Batch:
    """Tokens of one step.

    Attributes:
        x_TD: inputs; target_TD: what they should become.
        cluster_T: the cluster of each token; token_ids_T: one of the ids that only this cluster has, for rules that
            route by ids.
    """

    x_TD: Tensor
    target_TD: Tensor
    cluster_T: Tensor
    token_ids_T: Tensor


class ClusteredTask:
    """An endless stream of batches, the same for the same seed.

    Args:
        clusters: at most d_model, as their centres are at right angles.
        ids: of the vocabulary; id v belongs to cluster v mod C.

    Raises:
        ValueError: more clusters than dimensions, or fewer ids than clusters.
    """

    def __init__(
        self, clusters: int, d_model: int, ids: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        if not 1 <= clusters <= min(d_model, ids):
            raise ValueError(f"clusters = {clusters}: between 1 and d_model = {d_model} and ids = {ids}")
        self.clusters, self.ids = clusters, ids
        self._random, self._dtype = torch.Generator().manual_seed(seed), dtype
        self.centre_CD = torch.linalg.qr(self._normal(d_model, clusters)).Q.t()
        self.map_CDD = self._normal(clusters, d_model, d_model) / d_model**0.5

    def batch(self, tokens: int) -> Batch:
        """The next T tokens: clusters are equally likely."""
        cluster_T = torch.randint(self.clusters, (tokens,), generator=self._random)
        noise_TD = self._normal(tokens, self.centre_CD.shape[1])
        x_TD = DISTANCE * self.centre_CD[cluster_T] + SPREAD * noise_TD
        target_TD = torch.einsum("td,tde->te", x_TD, self.map_CDD[cluster_T])
        turn_T = torch.randint(self.ids // self.clusters, (tokens,), generator=self._random)
        return Batch(x_TD, target_TD, cluster_T, cluster_T + self.clusters * turn_T)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random, dtype=self._dtype)
