"""The layer of one rank: encode, exchanges with the experts between them, decode.

The slots of an expert are dealt out over chunks, which are exchanged one after another, and where S ranks share an
expert over S / r blocks, one for each of those that gather the same part of it. That is done when tokens are encoded:
the buffer is [chunk, expert, block, slot, D] from the beginning, so that a chunk is contiguous, its blocks in the order
of the ranks.

T tokens, E experts, L experts of a rank, K choices, C slots of each (source rank, expert), D model, W ranks, S = W / E
ranks of an expert where that is more than one; V = chunks x E x blocks buffers of c slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moebench.kernels.collectives.exchanges import plan_exchange
from moebench.kernels.collectives.group import Group, subgroup
from moebench.kernels.hetu_layout import tutel_decode, tutel_encode
from moebench.kernels.region import region
from moebench.systems.interface import LayerWeights
from moebench.systems.layer import ExpertParallelLayer
from moebench.systems.tutel.critical import Critical, extract_critical
from moebench.systems.tutel.experts import BatchedExperts
from moebench.systems.tutel.pipeline import pipelined
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import LayerWorkload

PHASES = {"flat": 1, "2d": 2}  # collectives of an exchange


@dataclass(frozen=True)
class Plan:
    """How a layer runs.

    Attributes:
        degree: chunks of an exchange, Tutel's a2a_ffn_overlap_degree.
        exchange: `flat` or `2d`.
        r: how often tokens are sent, to ranks that hold different parts of the expert; 0 gathers all weights instead.
    """

    degree: int = 1
    exchange: str = "flat"
    r: int = 1


@dataclass(frozen=True)
class Slots:
    """How the slots of every expert are dealt out: chunk by chunk, in a chunk block by block."""

    experts: int
    chunks: int
    blocks: int
    each: int

    @property
    def capacity(self) -> int:
        """Slots of an expert, padding included."""
        return self.chunks * self.blocks * self.each

    @property
    def buffers(self) -> int:
        """V, runs of `each` slots."""
        return self.chunks * self.experts * self.blocks

    def place(self, experts_TK: Tensor, positions_TK: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Buffer and slot of every route; without a meaning for one that is dropped, which the kernels pass over."""
        if capacity < self.capacity:
            positions_TK = positions_TK.masked_fill(positions_TK >= capacity, -1)
        if self.chunks * self.blocks == 1 or not self.each:
            return experts_TK, positions_TK
        part_TK = torch.div(positions_TK, self.each, rounding_mode="floor")
        slots_TK = torch.remainder(positions_TK, self.each)
        if self.blocks == 1:
            return torch.add(experts_TK, part_TK, alpha=self.experts), slots_TK
        chunk_TK = torch.div(part_TK, self.blocks, rounding_mode="floor")
        expert_TK = torch.add(experts_TK, chunk_TK, alpha=self.experts)
        return torch.add(torch.remainder(part_TK, self.blocks), expert_TK, alpha=self.blocks), slots_TK


class TutelLayer(ExpertParallelLayer):
    """Tutel's MOELayer."""

    def __init__(
        self,
        workload: LayerWorkload,
        group: Group,
        conventions: Conventions,
        device: torch.device,
        dtype: torch.dtype,
        plan: Plan,
    ):
        super().__init__(workload, group, conventions, device, dtype)
        self.plan = plan
        self.sharers = workload.sharers(group.size)
        block = self.sharers // max(plan.r, 1)
        first = group.index // block * block
        self.shard_group = subgroup(group, f"shards-{block}", group.ranks[first : first + block])

    def make_experts(self, device: torch.device, dtype: torch.dtype) -> BatchedExperts:
        """As `ExpertParallelLayer.make_experts`."""
        return BatchedExperts(self.workload, self.group.size, device, dtype)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's tokens through the layer: (y [T, D], auxiliary loss)."""
        with region("gate"):
            critical = extract_critical(
                self.gate(x_TD), self.workload, self.conventions, self.group, self.gate_context
            )
            if critical.counts_E is not None:
                self.note_counts(critical.counts_E)
            slots = self.slots(critical.capacity)
            routes = slots.place(critical.experts_TK, critical.positions_TK, critical.capacity)
        is_prescore = self.conventions.weight_site == "before-first-product"
        y_VSD = self.through_experts(self.encode(x_TD, routes, slots, critical, is_prescore), slots)
        with region("combine"):
            return tutel_decode(y_VSD, *routes, None if is_prescore else critical.weights_TK), critical.aux

    def slots(self, capacity: int) -> Slots:
        """C rounded up to what it is dealt out over; one row at least where a floor of 0 drops everything."""
        chunks, r = self.plan.degree, self.plan.r
        if self.group.size == 1 or r == 0:
            chunks = 1
        alignment = self.sharers * chunks
        if self.conventions.capacity_rule in ("k-times-floor", "floor-of-product"):
            capacity = max(capacity, 1)
        padded = -(-capacity // alignment) * alignment
        blocks = self.sharers // r if r else 1
        return Slots(self.workload.experts, chunks, blocks, padded // (chunks * blocks))

    def encode(
        self, x_TD: Tensor, routes: tuple[Tensor, Tensor], slots: Slots, critical: Critical, is_prescore: bool
    ) -> Tensor:
        """The buffers [V, c, D]."""
        with region("dispatch"):
            weights_TK = critical.weights_TK if is_prescore else None
            return tutel_encode(x_TD, *routes, slots.buffers, slots.each, weights_TK)

    def through_experts(self, x_VSD: Tensor, slots: Slots) -> Tensor:
        """Buffers to the experts and back."""
        if self.plan.r == 0 or self.group.size == 1:
            with region("exchange"):
                weights = self.experts.gathering(self.group, self.workload.experts).wait()
            with region("experts"):
                return weights(x_VSD)
        shape, r = x_VSD.shape, self.plan.r
        with region("dispatch"):
            x = x_VSD.view(slots.chunks, slots.experts, 1, slots.blocks * slots.each, shape[2])
            x = x.repeat(1, 1, r, 1, 1) if r > 1 else x
            x = x.view(slots.chunks, slots.experts * r * slots.blocks, slots.each, shape[2])
            chunks = list(x.unbind(0)) if slots.chunks > 1 else [x.view(x.shape[1:])]
            del x, x_VSD
        outputs = self.exchanged(chunks)
        with region("combine"):
            y = torch.stack(outputs) if len(outputs) > 1 else outputs[0]
            if r > 1:
                y = y.view(slots.chunks, slots.experts, r, -1, shape[2]).sum(dim=2)
            return y.view(shape)

    def exchanged(self, chunks: list[Tensor]) -> list[Tensor]:
        """Every chunk [max(E, W), c, D] through the experts of its ranks; as `pipelined` takes them."""
        ranks, local, (_, each, width) = self.group.size, chunks[0].shape[0] // self.group.size, chunks[0].shape
        with region("exchange"):
            gathering = self.experts.gathering(self.shard_group, local)
        weights = None

        def compute(x: Tensor) -> Tensor:
            nonlocal weights
            if weights is None:
                with region("exchange"):
                    weights = gathering.wait()
            x = x.view(ranks, local, each, width).transpose(0, 1).contiguous().view(local, ranks * each, width)
            x = weights(x).view(local, ranks, each, width).transpose(0, 1)
            return x.contiguous().view(ranks * local, each, width)

        plan = plan_exchange(self.plan.exchange, self.group)
        return pipelined(chunks, plan, PHASES[self.plan.exchange], compute)

    def load_weights(self, weights: LayerWeights) -> None:
        """Copy `weights` into this layer's parameters."""
        with torch.no_grad():
            if self.gate.weight_ED is not None:
                self.gate.weight_ED.copy_(weights.gate_DE.t())
            self.experts.load(weights)

    def weight_gradients(self) -> LayerWeights:
        """The gradients of this layer's parameters, in the common layout; zeros where autograd left None."""
        w1_LDF, w2_LFD, w3_LDF = self.experts.gradients()
        return LayerWeights(self.router_gradient(w1_LDF), w1_LDF, w2_LFD, w3_LDF)
