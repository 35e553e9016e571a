"""The door between device and host: what is read, written and waited for is announced, and answered under trace."""

import pytest
import torch

from moebench.kernels.host import QUANTITIES, UnansweredRead, answering, notifying, read_ints, synchronise, write_ints
from moebench.kernels.region import region
from moebench.trace.recorder import Recorder


def test_reads_are_announced_and_answered():
    """Real values come from the tensor, those of meta tensors from whoever answers; unknown names are refused."""
    heard = []
    with notifying(lambda quantity, values: heard.append((quantity, tuple(values.shape)))):
        assert read_ints(torch.tensor([[3, 1], [4, 1]]), "expert_counts") == [3, 1, 4, 1]
        with answering(lambda quantity, values: [7] * values.numel()):
            assert read_ints(torch.empty(2, dtype=torch.int64, device="meta"), "kept_counts") == [7, 7]
    assert heard == [("expert_counts", (2, 2)), ("kept_counts", (2,))]
    with pytest.raises(UnansweredRead, match="nothing answers"):
        read_ints(torch.empty(2, dtype=torch.int64, device="meta"), "kept_counts")
    with pytest.raises(ValueError, match="unknown quantity 'loads'"):
        read_ints(torch.zeros(1, dtype=torch.int64), "loads")
    assert len(set(QUANTITIES)) == len(QUANTITIES)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_synchronisation_is_a_read_of_nothing(device):
    """No bytes, no answer, no operator but the read itself, for contiguous tensors and others."""
    x = torch.zeros(4, 6, device=device)
    with Recorder([x]) as recorder, region("exchange"):
        synchronise(x)
        synchronise(x.t())
        synchronise(x[:0])
    reads = [op for op in recorder.ops if op.kind == "host-read"]
    assert [(op.name, op.bytes, op.region) for op in reads] == [("host::streams", 0, "exchange")] * 3
    assert {op.kind for op in recorder.ops} == {"host-read", "view"}  # the views are the test's


def test_counts_of_the_host_reach_the_device():
    """int64, in order; nothing too."""
    assert write_ints([3, 0, 5], torch.device("cpu")).tolist() == [3, 0, 5]
    assert write_ints([], torch.device("cpu")).shape == (0,)
    assert write_ints([1, 2], torch.device("meta")).shape == (2,)
