"""Small machines and programs for the tests of the simulator, with every number visible."""

from moebench.kernels.cost import Product
from moebench.program import COMMUNICATION, COMPUTE, Collective, Op, Program
from moebench.workloads.machine import Curve, Hardware, Parameter, Topology


def exact(value):
    """A parameter without uncertainty."""
    return Parameter(value, value, value, "", 1.0, "datasheet", "test")


def uncertain(value, low, high):
    return Parameter(value, low, high, "", 1.0, "assumed", "test")


GPU = {
    "gpu.memory.capacity": 24e9,
    "gpu.memory.reserved": 1e9,
    "gpu.memory.bandwidth": 600e9,
    "gpu.peak.fp32": 16e12,
    "gpu.peak.fp16": 100e12,
    "gpu.product.compute_share": 0.8,
    "gpu.product.bandwidth_share": 0.7,
    "gpu.product.fixed": 5e-6,
    "gpu.kernel.fixed": 3e-6,
    "host.issue.operator": 6e-6,
    "host.issue.view": 2e-6,
    "host.issue.custom": 30e-6,
    "host.issue.collective": 25e-6,
    "host.sync": 15e-6,
}
LINKS = {
    "link.bandwidth": 9e9,
    "link.latency": 10e-6,
    "link.message": 0.0,
    "nic.bandwidth": 12.2e9,
    "nic.latency": 15e-6,
    "nic.message": 0.0,
    "fabric.share": 1.0,
    "collective.fixed": 0.0,
}


def hardware(kind="gpu", curves=None, **changes):
    """A GPU or CPU; changes name parameters with `__` for `.` and `None` removes one."""
    return Hardware("test-gpu", "Test GPU", kind, _parameters(GPU, changes), curves or {})


def topology(nodes=1, gpus=8, nics=1, hw=None, **changes):
    """N nodes of G GPUs; changes as for `hardware`."""
    links = _parameters(LINKS, changes)
    return Topology(f"{nodes}x{gpus}-test", "Test", hw or hardware(), nodes, gpus, "pcie", nics, links)


def _parameters(base, changes):
    named = {name.replace("__", "."): value for name, value in changes.items()}
    values = {**base, **named}
    return {
        name: value if isinstance(value, Parameter) else exact(value)
        for name, value in values.items()
        if value is not None
    }


def curve(*points):
    """A curve from (size, share) pairs."""
    return Curve(tuple(p[0] for p in points), tuple(p[1] for p in points), "assumed", "test")


def all_to_all(ranks, bytes_per_peer=None, send=(), receive=(), group="world"):
    return Collective("all_to_all", group, ranks, bytes_per_peer, tuple(send), tuple(receive))


class ProgramBuilder:
    """Writes a program operator by operator."""

    def __init__(self, rank=0, world=1, stands_for=None):
        self.ops = []
        self.rank = rank
        self.world = world
        self.stands_for = range(world) if stands_for is None else stands_for

    def add(self, name, kind, region="experts", phase="forward", **rest):
        index = len(self.ops)
        rest = {"stream": COMPUTE, "shapes": ((1,),), "dtype": "fp32", **rest}
        self.ops.append(Op(index=index, name=name, kind=kind, region=region, phase=phase, **rest))
        return index

    def product(self, m, n, k, batch=1, dtype="fp32", **rest):
        size = {"fp32": 4, "fp16": 2, "fp64": 8}.get(dtype, 2)
        part = Product(m, n, k, batch)
        return self.add(
            "aten::bmm", "product", flops=part.flops, bytes_read=batch * (m * k + k * n) * size,
            bytes_written=batch * m * n * size, products=(part,), dtype=dtype, **rest,
        )  # fmt: skip

    def pointwise(self, moved, **rest):
        return self.add("aten::mul", "pointwise", bytes_read=moved // 2, bytes_written=moved - moved // 2, **rest)

    def view(self, **rest):
        return self.add("aten::view", "view", **rest)

    def read(self, **rest):
        return self.add("moebench::read", "host-read", **rest)

    def start(self, collective, region="exchange", **rest):
        name = f"moebench::{collective.algorithm}_start"
        return self.add(name, "collective", region, stream=COMMUNICATION, collective=collective, **rest)

    def wait(self, *indices, region="exchange", **rest):
        return self.add("moebench::wait", "wait", region, waits_on=indices, **rest)

    def program(self, peak_bytes=10**9, persistent_bytes=10**8):
        return Program(tuple(self.ops), self.rank, self.world, self.stands_for, persistent_bytes, peak_bytes)
