"""What each tier of a job must hold: by the paper's three inequalities (section 3.2.1), and for the storage here.

D dense and S sparse parameters of the whole job, alpha the share of the sparse ones that is active, L MoE layers.
"""

from dataclasses import dataclass

from moebench.systems.moesys.shard_files import needed_bytes
from moebench.systems.moesys.state_layout import StateLayout

STATE_BYTES = 16  # of a parameter under Adam: FP16 parameter and gradient, FP32 master, momentum, variance


@dataclass(frozen=True)
class TierBytes:
    """Bytes on all devices, in all host memories, on all disks of a job together."""

    device: float
    host: float
    disk: float

    def shortage(self, device: float, host: float, disk: float) -> str | None:
        """Which tier has less than it needs, and how much; None where all have enough."""
        for name, needed, there in (
            ("device memory", self.device, device),
            ("host memory", self.host, host),
            ("disk", self.disk, disk),
        ):
            if needed > there:
                return f"{name}: {needed:,.0f} bytes are needed, {there:,.0f} are there"
        return None


def paper_bytes(dense: float, sparse: float, alpha: float, layers: int) -> TierBytes:
    """16 D + 4 alpha S / L on devices, 16 alpha S in host memory, 12 S on disk.

    Raises:
        ValueError: alpha outside of 0 to 1, no layers, or negative parameters.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha = {alpha}: a share is between 0 and 1")
    if layers < 1 or dense < 0 or sparse < 0:
        raise ValueError(f"{layers} layers, {dense:g} dense and {sparse:g} sparse parameters: no such job")
    return TierBytes(
        STATE_BYTES * dense + 4 * alpha * sparse / layers, STATE_BYTES * alpha * sparse, (STATE_BYTES - 4) * sparse
    )


def storage_bytes(layout: StateLayout, experts: int, capacity: int, slots: int, waiting: int = 0) -> TierBytes:
    """What `HierarchicalStorage` takes for its experts: slots, cache and waiting gradients, two versions of each file.

    Args:
        waiting: experts whose gradients wait for a step at once.
    """
    gradients = waiting * layout.elements * layout.state_dtype.itemsize
    cached = min(capacity, experts) * layout.record_bytes
    return TierBytes(slots * layout.device_bytes, cached + gradients, needed_bytes(layout, experts))
