"""What a rank of a stage needs, whether that fits into a device's memory, and in words why it does not."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moebench.workloads.machine import Hardware

GIGA, GIBI = 1e9, float(2**30)
PARTS = ("parameters", "gradients", "states", "activations", "transient")


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a rank of one physical stage needs.

    Attributes:
        activations: of all micro-batches under way; transient: the most beside them.
    """

    stage: int
    parameters: float
    gradients: float
    states: float
    activations: float
    transient: float

    @property
    def model_states(self) -> float:
        """Parameters, gradients, the optimiser's."""
        return self.parameters + self.gradients + self.states

    @property
    def total(self) -> float:
        """All of them."""
        return self.model_states + self.activations + self.transient


def free_bytes(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """[N] of a device, beside what is reserved; negative where more is reserved than it has."""
    return values["gpu.memory.capacity"] - values.get("gpu.memory.reserved", np.zeros(1))


def room_of(hardware: Hardware, unit: float = GIGA) -> str:
    """What a device has: `h800 has 81.6 GB beside what is reserved`."""
    capacity = hardware.parameters["gpu.memory.capacity"].value
    reserved = hardware.parameters.get("gpu.memory.reserved")
    taken = reserved.value if reserved else 0.0
    name = "GB" if unit == GIGA else "GiB"
    if taken < capacity:
        return f"{hardware.name} has {giga(capacity - taken, unit)} {name} beside what is reserved"
    return f"{hardware.name} has {giga(capacity, unit)} {name}, all of them reserved ({giga(taken, unit)} {name})"


def stage_reason(
    needs: StageMemory, values: Mapping[str, np.ndarray], hardware: Hardware, at_least: str = ""
) -> str | None:
    """Which rank, which tensors, how much over; None where it fits nominally.

    Args:
        at_least: said before what is needed.
    """
    free = float(free_bytes(values)[0])
    if needs.total <= free:
        return None
    parts = ", ".join(f"{name} {giga(getattr(needs, name))}" for name in PARTS if getattr(needs, name))
    over = f"{giga(needs.total - free)} GB too many" if free > 0 else "nothing fits"
    return (
        f"a rank of stage {needs.stage} needs {at_least}{giga(needs.total)} GB ({parts}), {room_of(hardware)}: {over}"
    )


def giga(nbytes: float, unit: float = GIGA) -> str:
    """A decimal, more of what is less than a tenth."""
    return f"{nbytes / unit:.1f}" if nbytes >= 0.1 * unit else f"{nbytes / unit:.2g}"
