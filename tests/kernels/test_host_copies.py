"""Reads that overlap: copies to the host beside the device's queue, and one wait for them."""

import pytest
import torch

from moebench.kernels.host import UnansweredRead, answering, finish_reads, notifying, read_ints, start_read


class Listener:
    """Writes down what it is told."""

    def __init__(self):
        self.heard = []

    def copied(self, quantity, values):
        self.heard.append((quantity, tuple(values.shape)))
        return len(self.heard) - 1

    def finished(self, copies):
        self.heard.append(tuple(copies))


def test_values_are_those_at_the_start():
    """What is written into the tensor afterwards is not read; any shape comes back flat."""
    counts, received = torch.tensor([3, 1]), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    pending = start_read(counts, "expert_counts"), start_read(received, "received_counts")
    counts.zero_()
    assert finish_reads(*pending) == [[3, 1], [1, 2, 3, 4]]


def test_meta_values_are_answered_when_they_are_finished():
    """By quantity, as a blocking read; without an answer the case is unsupported."""
    meta = torch.empty(2, dtype=torch.int64, device="meta")
    with answering(lambda quantity, values: {"expert_counts": [5, 6], "kept_counts": [7, 8]}[quantity]):
        assert finish_reads(start_read(meta, "kept_counts"), start_read(meta, "expert_counts")) == [[7, 8], [5, 6]]
    pending = start_read(meta, "expert_counts")
    with pytest.raises(UnansweredRead, match="nothing answers"):
        finish_reads(pending)


def test_an_unknown_quantity_is_refused_at_the_start():
    """With the valid ones."""
    with pytest.raises(ValueError, match="unknown quantity 'rows'; choose one of expert_counts"):
        start_read(torch.tensor([1]), "rows")


def test_who_listens_for_copies_hears_of_them_and_of_one_wait():
    """Others hear of as many reads when they are finished; blocking reads are reads to both."""
    reads, listener = [], Listener()
    counts = torch.tensor([1, 2])
    with notifying(lambda quantity, _: reads.append(quantity)), notifying(lambda *_: reads.append("own"), listener):
        pending = start_read(counts, "expert_counts"), start_read(counts[:1], "kept_counts")
        assert reads == []
        finish_reads(*pending)
        assert reads == ["expert_counts", "kept_counts"]
        read_ints(counts, "expert_counts")
    assert listener.heard == [("expert_counts", (2,)), ("kept_counts", (1,)), (0, 1)]
    assert reads == ["expert_counts", "kept_counts", "expert_counts", "own"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device_the_values_arrive():
    """Behind work that is still queued."""
    counts = torch.arange(4, device="cuda")
    for _ in range(100):
        counts = counts + 1
    pending = start_read(counts, "expert_counts")
    counts.zero_()
    assert finish_reads(pending) == [[100, 101, 102, 103]]
