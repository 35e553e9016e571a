"""The clustered task: what a token should become depends on its cluster, and nothing else tells it."""

import pytest
import torch

from moebench.workloads.clustered import DISTANCE, ClusteredTask


def test_tokens_stand_around_their_clusters_centre_and_undergo_its_map():
    """The nearest centre is the token's own; targets are its cluster's linear map; ids belong to one cluster."""
    task = ClusteredTask(4, 16, ids=12, seed=3, dtype=torch.float64)
    batch = task.batch(500)
    distances_TC = torch.cdist(batch.x_TD, DISTANCE * task.centre_CD)
    assert (distances_TC.argmin(dim=1) == batch.cluster_T).double().mean() > 0.99
    for x_D, target_D, cluster in zip(batch.x_TD, batch.target_TD, batch.cluster_T.tolist()):
        torch.testing.assert_close(target_D, x_D @ task.map_CDD[cluster])
    assert torch.equal(batch.token_ids_T % 4, batch.cluster_T)
    assert (int(batch.token_ids_T.min()), int(batch.token_ids_T.max())) == (0, 11)
    torch.testing.assert_close(task.centre_CD @ task.centre_CD.t(), torch.eye(4, dtype=torch.float64))


def test_a_seed_is_a_stream():
    """The same batches in the same order, each another one; another seed, others."""
    one, same, other = (ClusteredTask(2, 4, seed=seed) for seed in (0, 0, 1))
    first, second = one.batch(8), one.batch(8)
    assert torch.equal(first.x_TD, same.batch(8).x_TD)
    assert torch.equal(second.target_TD, same.batch(8).target_TD)
    assert not torch.equal(first.x_TD, second.x_TD)
    assert not torch.equal(first.x_TD, other.batch(8).x_TD)
    assert one.batch(0).x_TD.shape == (0, 4)


@pytest.mark.parametrize(("clusters", "d_model", "ids"), [(0, 4, 8), (5, 4, 8), (3, 4, 2)])
def test_clusters_need_room(clusters, d_model, ids):
    """A direction and an id each."""
    with pytest.raises(ValueError, match=f"clusters = {clusters}: between 1 and d_model = {d_model} and ids = {ids}"):
        ClusteredTask(clusters, d_model, ids)
