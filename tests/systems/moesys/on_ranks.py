"""What ranks run in the tests of this folder; apart, so that a rank does not import pytest. A check returns words."""

from tests.systems.moesys import elastic_on_ranks as elastic
from tests.systems.moesys import embedding_on_ranks as embedding
from tests.systems.moesys import released_on_ranks as released
from tests.systems.moesys import storage_on_ranks as storage


def all_checks(group):
    """Every check of one world, by name; one start of the ranks serves them all."""
    return {
        "embedding": embedding.embedding_equals_the_whole_one(group),
        "embedding bytes": embedding.embedding_sends_what_the_formulas_say(group),
        "embedding table": embedding.embedding_shares_the_table(group),
        "elastic": elastic.elastic_equals_one_rank(group),
        "elastic rows": elastic.rows_travel(group),
        "elastic empty": elastic.an_empty_rank_waits(group),
        "elastic bytes": elastic.branches_travel_among_their_replicas_only(group),
        "elastic baseline": elastic.the_baseline_is_ddp(group),
        "elastic training": elastic.tasks_are_learnt(group),
        "fusion": storage.fused_buffers_equal_single_tensors(group),
        "slices": storage.slices_equal_whole_layers(group),
        "released gate": released.released_layer_equals_its_definition(group),
        "released counts": released.released_gate_keeps_what_is_counted_without_ranks(group),
        "2D prefetch": storage.a_prefetched_model_equals_the_plain_one(group),
    }
