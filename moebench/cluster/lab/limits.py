"""What the shapers of an emulated network can be told; beyond it the kernel refuses, or nothing ever arrives."""

from moebench.cluster.lab.namespaces import MTU

LEAST_RATE, MOST_RATE = 8e3, 1e12  # bit/s; `tc` takes no less than a byte a millisecond
LEAST_BUFFER_BYTES = 2 * (MTU + 14)  # a shaper passes no packet that does not fit
MOST_BUFFER_BYTES = 1 << 30  # `tc` takes less than 4 GiB


def rate_problem(bits_per_s: float) -> str | None:
    """None for a rate that a NIC can be held to, else which it can."""
    if LEAST_RATE <= bits_per_s <= MOST_RATE:
        return None
    return f"an emulated NIC is held to {LEAST_RATE / 1e3:g}kbit to {MOST_RATE / 1e9:g}gbit"


def buffer_problem(size_bytes: float) -> str | None:
    """None for a buffer that a switch port can be given, else which it can."""
    if LEAST_BUFFER_BYTES <= size_bytes <= MOST_BUFFER_BYTES:
        return None
    return f"a port of the emulated switch holds {LEAST_BUFFER_BYTES / 2**10:.3g}kb to {MOST_BUFFER_BYTES >> 20}mb"
