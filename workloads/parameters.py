"""The names of a machine's parameters: dimension, bounds and meaning of each, and the rules that every one obeys.

Files and `--set` go through the same door, `make_parameter`, so that nothing else has to check a number again.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches

from moebench.kernels.cost import KINDS
from moebench.workloads.errors import InputError
from moebench.workloads.machine import STATUSES, Parameter
from moebench.workloads.units import BYTES, COUNT, FLOP_RATE, RATE, SHARE, TIME, parse

PEAK_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
# Kinds that a device spends memory time on; the others are products, free, or belong to the host and the network.
MEMORY_KINDS = tuple(
    kind for kind in KINDS if kind not in ("product", "view", "allocation", "collective", "wait", "host-read")
)
LINK_KINDS = ("nvlink", "pcie", "shared-memory")


_BOUNDS = {RATE: (1.0, 1e18), FLOP_RATE: (1.0, 1e24), BYTES: (0.0, 1e18), SHARE: (1e-6, math.inf), COUNT: (0.0, 1e6)}


@dataclass(frozen=True, slots=True)
class Spec:
    """What a parameter of this name may be.

    Attributes:
        least, most: bounds of its SI value, `most` included.
        zero_allowed: whether `least` itself is allowed.
    """

    name: str
    dimension: str
    meaning: str
    required: bool = False
    least: float = 0.0
    most: float = math.inf
    zero_allowed: bool = False

    def __post_init__(self) -> None:
        """Bounds where none are given: beyond any machine, and what is computed from them stays finite."""
        least, most = _BOUNDS.get(self.dimension, (0.0, math.inf))
        if math.isinf(self.most):
            object.__setattr__(self, "most", most)
        if self.least == 0 and not self.zero_allowed:
            object.__setattr__(self, "least", least)


def _time(name: str, meaning: str, required: bool = True) -> Spec:
    return Spec(name, TIME, meaning, required, most=10.0, zero_allowed=True)


HARDWARE_SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("gpu.memory.capacity", BYTES, "device memory", required=True),
        Spec("gpu.memory.reserved", BYTES, "memory that no program gets: context, buffers", True, zero_allowed=True),
        Spec("gpu.memory.bandwidth", RATE, "peak rate of device memory, reads and writes together", required=True),
        *(Spec(f"gpu.peak.{dtype}", FLOP_RATE, f"peak {dtype} rate of matrix products") for dtype in PEAK_DTYPES),
        Spec("gpu.product.compute_share", SHARE, "a: share of the peak rate in products", True, most=1.5),
        *(
            Spec(f"gpu.product.compute_share.{dtype}", SHARE, f"a for {dtype}, where it differs", most=1.5)
            for dtype in PEAK_DTYPES
        ),
        Spec("gpu.product.bandwidth_share", SHARE, "b: share of memory bandwidth in products", True, most=1.5),
        _time("gpu.product.fixed", "o: time of a product that does nothing"),
        _time("gpu.kernel.fixed", "time of any other kernel that does nothing"),
        Spec("gpu.efficiency.product", SHARE, "factor on the rate of products", most=20.0),
        *(Spec(f"gpu.efficiency.{kind}", SHARE, f"factor on the curve of {kind}", most=20.0) for kind in MEMORY_KINDS),
        Spec("gpu.sms", COUNT, "streaming multiprocessors", least=1.0, zero_allowed=True),
        Spec("gpu.l2", BYTES, "last-level cache"),
        _time("host.issue.operator", "host time to issue a plain operator"),
        _time("host.issue.view", "host time of a view"),
        _time("host.issue.custom", "host time to issue a custom operator"),
        _time("host.issue.collective", "host time to issue a collective"),
        _time("host.sync", "host time of a blocking device read, beyond the drained queue"),
    )
}

LINK_SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec("link.bandwidth", RATE, "rate at which a GPU sends, and receives, inside the node", required=True),
        _time("link.latency", "latency inside the node"),
        _time("link.message", "cost of a message inside the node"),
        _time("link.eager.latency", "latency of the protocol for small messages inside the node; absent: one protocol",
              required=False),
        Spec("link.eager.bandwidth", RATE, "rate of that protocol"),
        Spec("bridge.bandwidth", RATE, "rate of all in-node traffic together; absent: no limit"),
        Spec("nic.bandwidth", RATE, "rate of one NIC each way", required=True),
        _time("nic.latency", "latency between nodes"),
        _time("nic.message", "cost of a message between nodes"),
        Spec("nic.message_bytes", BYTES, "bytes that a message adds on the wire: notices, acknowledgements"),
        Spec("nic.payload_share", SHARE, "payload's share of the wire in large messages; absent: all of it", most=1.0),
        Spec("fabric.share", SHARE, "share of the NICs' bandwidth that the fabric carries at once", True, most=1.0),
        Spec("spine.share", SHARE, "share of the NICs' bandwidth that spines carry from rail to rail; absent: no rails",
             most=1.0),
        _time("spine.latency", "latency that a change of rail adds; absent: none", required=False),
        _time("collective.fixed", "time of a collective that moves nothing"),
        Spec("storage.read.bandwidth", RATE, "rate at which a node reads its storage; absent: no program may"),
        Spec("storage.write.bandwidth", RATE, "rate at which a node writes its storage"),
        _time("storage.latency", "from a read or write of storage to its first byte", required=False),
        Spec("copy.bandwidth", RATE, "rate of copies between host memory and a GPU, each way, each GPU its own"),
        _time("copy.latency", "time of such a copy that moves nothing", required=False),
        Spec("host.memory.bandwidth", RATE, "rate of a node's host memory, reads and writes together"),
        Spec("switch.buffer", BYTES, "what a switch port holds before it drops; absent: always deep enough"),
        Spec("host.cores", COUNT, "cores that all ranks of the cluster share; absent: each rank has its own", least=1.0,
             zero_allowed=True),
        _time("host.message", "processor time of a message, sending and receiving it; absent: none", required=False),
        Spec("host.stream", RATE, "rate at which a core sends and receives a stream; absent: at no cost to it"),
    )
}


def spec_of(name: str, specs: dict[str, Spec], where: str = "") -> Spec:
    """The spec of a parameter name.

    Raises:
        InputError: no such parameter; lists the valid names.
    """
    if name in specs:
        return specs[name]
    place = f"{where}: " if where else ""
    near = get_close_matches(name, specs, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InputError(f"{place}unknown parameter {name!r}{hint}; choose one of: {', '.join(specs)}")


def make_parameter(
    spec: Spec,
    value: str | int | float,
    status: str,
    source: str,
    low: str | int | float | None = None,
    high: str | int | float | None = None,
    where: str = "",
) -> Parameter:
    """A checked Parameter from what a file or the command line says.

    Raises:
        InputError: wrong unit, a value outside its bounds, no source, an unknown status, a range on a datasheet number,
            no range on any other, or not low <= value <= high.
    """
    place = f"{where}: " if where else ""
    if status not in STATUSES:
        raise InputError(f"{place}unknown status {status!r}; choose one of: {', '.join(STATUSES)}")
    if not source.strip():
        raise InputError(f"{place}source is empty; say where the number comes from")
    if status == "datasheet" and (low is not None or high is not None):
        raise InputError(f"{place}a datasheet number has no range; leave low and high out or change the status")
    if status != "datasheet" and (low is None or high is None):
        raise InputError(f"{place}status {status!r} needs a range: both low and high")
    quantity = parse(value, spec.dimension, where)
    points = [quantity.si] + [
        quantity.si if end is None else parse(end, spec.dimension, where).si for end in (low, high)
    ]
    for point in points:
        _check_bounds(spec, point, quantity.unit, quantity.scale, place)
    if not points[1] <= points[0] <= points[2]:
        raise InputError(f"{place}low = {low}, value = {value}, high = {high}: must be low <= value <= high")
    return Parameter(points[0], points[1], points[2], quantity.unit, quantity.scale, status, source.strip())


def _check_bounds(spec: Spec, value: float, unit: str, scale: float, place: str) -> None:
    shown = f"{value / scale:g}" + ("" if unit == "1" else f" {unit}")
    if value < 0:
        raise InputError(f"{place}{shown} is negative; {spec.meaning} cannot be")
    if value < spec.least or (value == spec.least and not spec.zero_allowed):
        raise InputError(f"{place}{shown} is too small; {spec.meaning} must be above {spec.least:g}")
    if value > spec.most:
        raise InputError(f"{place}{shown} is too large; {spec.meaning} is at most {spec.most:g} in SI units")
    if spec.dimension == COUNT and value != int(value):
        raise InputError(f"{place}{shown} is not a whole number")
