"""What the tiers of a job must hold."""

import pytest

from moebench.systems.moesys.policies import make_policy
from moebench.systems.moesys.state_layout import StateLayout
from moebench.systems.moesys.storage import HierarchicalStorage
from moebench.systems.moesys.tiers import paper_bytes, storage_bytes

EXPERT = 2 * 4096 * 16384
DENSE = 1.02e9


def test_the_largest_model_of_the_paper():
    """207.2 B parameters, 12 layers of 128 experts: 2.47 TB of states on disk, 3.30 TB in host memory if all work."""
    sparse = 12 * 128 * EXPERT
    assert (DENSE + sparse) / 1e9 == pytest.approx(207.2, abs=0.1)
    found = paper_bytes(DENSE, sparse, 1.0, 12)
    assert found.disk / 1e12 == pytest.approx(2.47, abs=0.01)
    assert found.host / 1e12 == pytest.approx(3.30, abs=0.01)
    assert found.device == pytest.approx(16 * DENSE + 4 * sparse / 12)
    assert paper_bytes(DENSE, sparse, 0.25, 12).host == found.host / 4


def test_a_tier_that_is_too_small_is_named():
    """The first of them, with both numbers."""
    found = paper_bytes(10, 120, 0.5, 2)
    assert (found.device, found.host, found.disk) == (280, 960, 1440)
    assert found.shortage(280, 960, 1440) is None
    assert found.shortage(280, 960, 1439) == "disk: 1,440 bytes are needed, 1,439 are there"
    assert found.shortage(1, 1, 1).startswith("device memory")


def test_the_storage_takes_what_is_said():
    """Slots and cache, to the byte; the paper's 12 bytes a parameter on disk, twice, and headers."""
    layout = StateLayout({"w1_DF": (64, 256), "w2_FD": (256, 64)})
    keys = [(0, expert) for expert in range(8)]
    storage = HierarchicalStorage(None, make_policy("lru", 3), 2, "meta", layout, keys)
    found = storage_bytes(layout, len(keys), 3, 2)
    assert (found.device, found.host) == (storage.device_bytes, storage.host_bytes)
    paper = paper_bytes(0, len(keys) * layout.elements, 1.0, 1)
    assert 2 * paper.disk < found.disk < 2.1 * paper.disk
    assert storage_bytes(layout, 8, 3, 2, waiting=5).host - found.host == 5 * 4 * layout.elements


def test_what_has_no_meaning_is_refused():
    """A share above 1, no layers."""
    with pytest.raises(ValueError, match="alpha = 2"):
        paper_bytes(1, 1, 2, 1)
    with pytest.raises(ValueError, match="0 layers"):
        paper_bytes(1, 1, 1, 0)
