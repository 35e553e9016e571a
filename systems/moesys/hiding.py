"""When copies hide behind compute in a ring of K slots, by formula, and the times of a ring step by step.

A layer computes a (attention and all that needs no expert) and then e (its experts); a copy of its experts takes c; so
many copies run at once as there are readers r. A slot is busy from the begin of a copy to the end of e. In the steady
state a layer takes the longest of

    a + e              the compute itself
    c / r              the link: every layer is copied once for each pass, whatever K is
    (c + e) / K        the slots: each serves one layer in K, and is busy with it for c + e

so that copies hide if c <= r (a + e) and c <= (K - 1)(a + e) + a. With one reader and even times the first says more:
two slots are enough, and more of them serve times that vary. With K = N nothing is copied. Kept layers leave fewer
copies: N - keep of them for N layers of compute.
"""

from dataclasses import dataclass

from moebench.systems.moesys.ring import check_slots, kept_layers


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer: a, e and c.

    Raises:
        ValueError: one is negative.
    """

    dense_s: float
    experts_s: float
    copy_s: float

    def __post_init__(self) -> None:
        for name in ("dense_s", "experts_s", "copy_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")

    @property
    def compute_s(self) -> float:
        """a + e."""
        return self.dense_s + self.experts_s


def layer_s(times: LayerTimes, layers: int, slots: int, readers: int = 1) -> float:
    """What a layer takes in the steady state, nothing kept.

    Raises:
        InputError: slots below 1 or above the layers.
    """
    check_slots(slots, layers)
    if slots == layers:
        return times.compute_s
    return max(times.compute_s, times.copy_s / min(readers, slots), (times.copy_s + times.experts_s) / slots)


def hides(times: LayerTimes, layers: int, slots: int, readers: int = 1) -> bool:
    """Whether a pass takes no longer than without offload."""
    return layer_s(times, layers, slots, readers) <= times.compute_s


def synchronous_s(times: LayerTimes) -> float:
    """What a layer takes that is copied when it is needed."""
    return times.compute_s + times.copy_s


def pass_ends_s(
    times: LayerTimes, layers: int, slots: int, passes: int, keep: int = 0, readers: int = 1
) -> list[float]:
    """When each pass over the layers ends, step by step, from nothing copied.

    Raises:
        InputError: as `check_slots`.
    """
    check_slots(slots, layers, keep)
    kept = set(range(layers) if slots == layers else kept_layers(layers, keep))
    ring = slots - len(kept)
    free = [0.0] * readers  # when each reader is
    arrived = [_copied(free, 0.0, times.copy_s) for _ in kept]
    there = max(arrived, default=0.0)
    copies = [_copied(free, 0.0, times.copy_s) for _ in range(ring)]  # ends, in the order of use
    now, ends, used = 0.0, [], 0
    for _ in range(passes):
        for layer in range(layers):
            now += times.dense_s
            if layer in kept:
                now = max(now, there) + times.experts_s
                continue
            now = max(now, copies[used]) + times.experts_s
            used += 1
            copies.append(_copied(free, now, times.copy_s))
        ends.append(now)
    return ends


def _copied(free: list[float], asked: float, copy_s: float) -> float:
    """When a copy ends that the first free reader takes."""
    reader = min(range(len(free)), key=free.__getitem__)
    free[reader] = max(free[reader], asked) + copy_s
    return free[reader]
