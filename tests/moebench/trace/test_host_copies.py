"""Reads that overlap, as the recorder sees them."""

import torch

from moebench.kernels.host import finish_reads, start_read
from moebench.kernels.region import region
from moebench.trace.recorder import Recorder


def test_copies_stand_on_a_stream_of_their_own_and_the_read_waits_for_them():
    """Two copies, work in between, one host read that names them; bytes are those of the values."""
    counts, received = torch.arange(4), torch.arange(6, dtype=torch.int32).view(2, 3)
    with Recorder([counts, received]) as recorder:
        with region("dispatch"):
            pending = start_read(counts, "expert_counts"), start_read(received, "received_counts")
            torch.neg(counts)
        with region("exchange"):
            finish_reads(*pending)
    first, second, work, read = recorder.ops
    assert [(op.name, op.kind, op.stream) for op in recorder.ops] == [
        ("host::copy_expert_counts", "copy", "device-to-host"),
        ("host::copy_received_counts", "copy", "device-to-host"),
        ("aten::neg", "pointwise", "compute"),
        ("host::event", "host-read", "compute"),
    ]
    assert (first.bytes_read, second.bytes_read, first.bytes_written) == (32, 24, 0)
    assert (first.shapes, second.dtype) == (((4,),), "int32")
    assert read.waits_on == (first.index, second.index)
    assert [op.region for op in recorder.ops] == ["dispatch", "dispatch", "dispatch", "exchange"]
    assert work.waits_on == ()
