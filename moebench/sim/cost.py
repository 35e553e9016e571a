"""What an operator costs on a described machine: device time and host issue time, for all draws at once.

Sees operators, bytes and hardware, nothing else. Costs are independent of when an operator runs, so a whole program is
priced here in a few array operations and the replay only adds times up.

Device time = max(FLOPs / rate, bytes / bandwidth) + launches x fixed. On the bf16 products of aiconfigurator-core
0.12.0 (6,000 rows a GPU of vLLM's tables, fitted on one half, tested on the other) this law with the tiles below and
the shares in the hardware files has a median error of 10 % on A100, 9 % on H100, 10 % on H200, 11 % on B200; 90th
percentile 34, 26, 28 and 36 %.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moebench.kernels.cost import Product
from moebench.program import TRANSFERS, Op
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Curve, Hardware

NO_DEVICE_WORK = frozenset(("view", "allocation", "wait", "host-read"))
LIMITS = ("none", "compute", "memory", "fixed")  # what bounds an operator

# Of a transfer: its rate, its latency if it has one, and whether the GPUs of a node share the rate.
TRANSFER_RATES = {
    "storage-read": ("storage.read.bandwidth", "storage.latency", True),
    "storage-write": ("storage.write.bandwidth", "storage.latency", True),
    "to-device": ("copy.bandwidth", "copy.latency", False),
    "to-host": ("copy.bandwidth", "copy.latency", False),
    "host-update": ("host.memory.bandwidth", None, True),
}

# Output tiles of library products and the rate that each reaches, against the largest ones; the shapes of CUTLASS and
# cuBLAS kernels, rates from hardware.md's fit on Hopper (the two narrowest: assumed).
_TILES = np.array(
    [
        (128, 256, 1.0),
        (256, 128, 1.0),
        (128, 128, 1.0),
        (64, 128, 0.75),
        (128, 64, 0.75),
        (64, 64, 0.66),
        (128, 32, 0.5),
        (32, 128, 0.5),
    ]
)
_SPLITS = np.array([1, 2, 4, 8, 16, 32, 64])  # parts of the k dimension that separate SMs may sum
_LEAST_SPLIT_K = 256
_K_STEP = 64


@dataclass(frozen=True)
class OpCosts:
    """Costs of operators, in their order.

    Attributes:
        device_s: [ops, N] time on the operator's stream; 0 for collectives, which the network model prices.
        issue_s: [ops, N] host time to issue it, a host read's synchronisation included.
        limits: [ops] index into `LIMITS` under the nominal draw.
    """

    device_s: np.ndarray
    issue_s: np.ndarray
    limits: np.ndarray


Issue = tuple[str, int, int]  # the parameter that prices an operator's issue, its launches, and parts of one kernel


def op_costs(ops: Sequence[Op], machine: "Machine") -> OpCosts:
    """Price operators under every draw.

    Raises:
        InputError: the machine lacks a parameter that an operator needs.
    """
    return costs_of(ops, [issue_of(op) for op in ops], machine)


def costs_of(ops: Sequence[Op], issues: Sequence[Issue], machine: "Machine") -> OpCosts:
    """Device times of operators and host times of issues, which need not be those of the same ones.

    Raises:
        InputError: as `op_costs`.
    """
    device_s, limits = _device_costs(ops, machine)
    return OpCosts(device_s, machine.issue_s(issues) * machine.crowding, limits)


def _device_costs(ops: Sequence[Op], machine: "Machine") -> tuple[np.ndarray, np.ndarray]:
    """[ops, N] seconds and [ops] limits."""
    device = np.zeros((len(ops), machine.draws))
    limits = np.zeros(len(ops), dtype=np.int8)
    for indices in _grouped(ops):
        group = [ops[i] for i in indices]
        compute, memory, fixed = machine.device_parts(group)
        np.maximum(compute, memory, out=memory)
        limits[indices] = np.where(fixed[:, 0] > memory[:, 0], 3, np.where(compute[:, 0] >= memory[:, 0], 1, 2))
        memory += fixed
        device[indices] = memory / np.array([op.tiles for op in group])[:, None]
    return device * machine.crowding, limits


def compute_time_s(op: Op, hardware: Hardware, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Device time of one operator under every draw."""
    return op_costs([op], Machine(hardware, values)).device_s[0]


class Machine:
    """A hardware description with drawn parameter values: rates by name, as arrays over the draws.

    Attributes:
        crowding: [N] how many times longer a rank takes for its own work where `ranks` processes share one computer's
            cores (`host.cores`) and all of them are busy: each has its core for that share of the time. What they
            take from each other on the way to memory is in the hardware's own numbers, measured with all of them busy.
    """

    def __init__(
        self, hardware: Hardware, values: Mapping[str, np.ndarray], ranks: int = 1, ranks_per_node: int = 1
    ) -> None:
        self.hardware = hardware
        self.values = values
        self.draws = max((np.size(v) for v in values.values()), default=1)
        self.ranks, self.ranks_per_node = ranks, ranks_per_node
        shares = "host.cores" in values
        self.crowding = np.maximum(1.0, ranks / self.value("host.cores")) if shares else np.ones(1)

    def value(self, name: str, default: float | None = None) -> np.ndarray:
        """A parameter over the draws, [N] or [1].

        Raises:
            InputError: absent, and no default.
        """
        if name in self.values:
            return np.atleast_1d(np.asarray(self.values[name], dtype=float))
        if default is None:
            family = name.rsplit(".", 1)[0] + "."
            near = sorted(n for n in self.values if n.startswith(family))
            raise InputError(
                f"machine with {self.hardware.name}: parameter {name} is missing; of its kind there are: "
                f"{', '.join(near) or 'none'}"
            )
        return np.full(1, float(default))

    def device_parts(self, group: Sequence[Op]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute, memory and fixed seconds, [ops, N] each, of operators of one kind and dtype; of parts of a kernel
        those of the whole one.
        """
        kind, dtype = group[0].kind, group[0].dtype
        if kind in TRANSFERS:
            return self._transfer_parts(group)
        moved = np.array([op.bytes * op.tiles for op in group], dtype=float)
        bandwidth = self.value("gpu.memory.bandwidth")
        if kind == "product":
            work, rate = self._product_work(group, dtype)
            bandwidth = bandwidth * self.value("gpu.product.bandwidth_share")
            fixed = self.value("gpu.product.fixed")
        else:
            work = np.array([op.flops * op.tiles for op in group], dtype=float)
            rate = self._vector_rate(dtype) if work.any() else np.ones(1)
            moved = moved / self.memory_share(kind, moved)
            bandwidth = bandwidth * self.value(f"gpu.efficiency.{kind}", 1.0)
            fixed = self.value("gpu.kernel.fixed")
        each = np.ones(self.draws)
        launches = np.array([op.launches for op in group], dtype=float)
        costs = ((work, 1 / rate), (moved, 1 / bandwidth), (launches, fixed))
        compute, memory, start = (np.multiply.outer(amount, each * unit) for amount, unit in costs)
        return compute, memory, start

    def _transfer_parts(self, group: Sequence[Op]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `device_parts`, of transfers of one kind. What a node has once, its GPUs use at once."""
        bandwidth, latency, is_shared = TRANSFER_RATES[group[0].kind]
        rate = self.value(bandwidth) / (self.ranks_per_node if is_shared else 1)
        moved, each = np.array([op.bytes for op in group], dtype=float), np.ones(self.draws)
        memory = np.multiply.outer(moved, each / rate)
        fixed = np.multiply.outer(np.ones(len(group)), each * self.value(latency)) if latency else np.zeros_like(memory)
        return np.zeros_like(memory), memory, fixed

    def issue_s(self, issues: Sequence[Issue]) -> np.ndarray:
        """Host seconds to issue operators, [issues, N]."""
        issue = np.empty((len(issues), self.draws))
        for i, (name, launches, tiles) in enumerate(issues):
            issue[i] = self.value(name) * np.ones(self.draws)
            if launches > 1:  # from inside an operator, by the same driver
                issue[i] += (launches - 1) * (self.value("host.issue.operator") * np.ones(self.draws))
            issue[i] /= tiles
        return issue

    def compute_share(self, dtype: str) -> np.ndarray:
        """Share of the peak rate in products: the dtype's own where it is given."""
        own = f"gpu.product.compute_share.{dtype}"
        return self.value(own if own in self.values else "gpu.product.compute_share")

    def _vector_rate(self, dtype: str) -> np.ndarray:
        """FLOP/s outside matrix units: fp32's, whatever the narrower dtype."""
        name = "gpu.peak.fp64" if dtype == "fp64" and "gpu.peak.fp64" in self.values else "gpu.peak.fp32"
        return self.value(name)

    def memory_share(self, kind: str, moved: np.ndarray) -> np.ndarray:
        """Share of memory bandwidth that an operator of this kind reaches, by bytes: its own curve, else `memory`'s."""
        curve = self.hardware.curves.get(kind, self.hardware.curves.get("memory"))
        return share_at(curve, moved) if curve else np.ones(1)

    def _product_work(self, group: Sequence[Op], dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """FLOPs of each operator, inflated by what the shape loses, and the rate [N] at which they run."""
        products = [product for op in group for product in op.products]
        owner = np.repeat(np.arange(len(group)), [len(op.products) for op in group])
        if not products:  # a fused operator that states FLOPs only
            owner = np.arange(len(group))
        flops = np.array([part.flops for part in products] or [op.flops * op.tiles for op in group], dtype=float)
        rate = self.value(f"gpu.peak.{dtype}") * self.value("gpu.efficiency.product", 1.0)
        curve = self.hardware.curves.get(f"product.{dtype}")
        if curve:
            work = flops / share_at(curve, flops)
        else:
            rate = rate * self.compute_share(dtype)
            sms = round(float(self.value("gpu.sms", 0.0)[0]))
            work = tiled_flops(products, sms) if sms and products else flops
        return np.bincount(owner, weights=work, minlength=len(group)), rate


def share_at(curve: Curve, size: np.ndarray) -> np.ndarray:
    """The curve's share at each size: a straight line between points in logarithms of both, flat outside.

    Geometric rather than linear in the share: between two measured points more work then never takes less time.
    """
    return np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(curve.at), np.log(curve.share)))


def tiled_flops(products: Sequence[Product], sms: int) -> np.ndarray:
    """FLOPs that the SMs are busy for, each in whole tiles and all in whole waves, under the best tile and split of k.

    Never less than the product's own FLOPs, except for empty products, which take none. A product with a dimension of 1
    has vectors for operands or result: libraries have kernels for it without tiles, as fast as memory gives them.
    """
    shape = np.array([(p.m, p.n, p.k, p.batch) for p in products], dtype=float).reshape(-1, 4)
    m, n, k, batch = (shape[:, i, None, None] for i in range(4))
    tile_m, tile_n, rate = (_TILES[None, :, i, None] for i in range(3))
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n) * batch
    least_k = np.where(_SPLITS == 1, 0, _SPLITS * _LEAST_SPLIT_K)  # a shorter k is padded: more work is never faster
    depth = np.ceil(np.maximum(k, least_k) / _SPLITS / _K_STEP) * _K_STEP
    waves = np.ceil(tiles * _SPLITS / sms)
    tiled = (2 * waves * sms * tile_m * tile_n * depth / rate).min(axis=(1, 2))
    return np.where((shape[:, :3] == 1).any(axis=1), 2 * shape.prod(axis=1), tiled)


def issue_of(op: Op) -> Issue:
    """What the host pays for an operator."""
    return _issue_parameter(op), max(op.launches, 1), op.tiles


def has_device_work(op: Op) -> bool:
    """Whether an operator takes time on a device's stream by itself."""
    return op.kind not in NO_DEVICE_WORK and op.collective is None and bool(op.bytes or op.flops)


def _issue_parameter(op: Op) -> str:
    """The name of the hardware parameter that prices the operator's issue."""
    if op.kind == "host-read":
        return "host.sync"
    if op.kind == "collective":
        return "host.issue.collective"
    if op.kind in ("view", "allocation"):
        return "host.issue.view"
    return "host.issue.operator" if op.name.startswith(("aten::", "host::")) else "host.issue.custom"


def _grouped(ops: Sequence[Op]) -> list[list[int]]:
    """Indices of the operators that do work on the device, by kind, dtype and whether they list products."""
    groups: dict[tuple[str, str, bool], list[int]] = {}
    for i, op in enumerate(ops):
        if not has_device_work(op):
            continue
        groups.setdefault((op.kind, op.dtype, bool(op.products)), []).append(i)
    return list(groups.values())
