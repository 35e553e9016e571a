"""A GPT-2 whose experts are not where it computes: layers that borrow their weights, and where those come from.

On a described GPU there is nothing to copy from; a GPU copies from pinned memory, a CPU reads a file, which has no name
any more once it is open. Biases of experts stay with the model.

L experts of this rank, N layers with experts.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import all_to_all
from moebench.kernels.explicit import count
from moebench.kernels.host import read_ints
from moebench.kernels.region import region
from moebench.systems.moesys.copies import Copies, DescribedCopies, DiskCopies, StreamCopies, pinned_layers
from moebench.systems.moesys.expert_file import ExpertFile, ExpertLayout, Weights, write_expert_file
from moebench.systems.moesys.ring import Ring, Synchronous
from moebench.systems.moesys.run_experts import ChosenExperts, Layers
from moebench.workloads.errors import InputError
from moebench.workloads.models.gpt2_moe import GPT2MoE
from moebench.workloads.models.moe import MoE, Routes
from moebench.workloads.models.shape import GPT2MoEShape


@dataclass(frozen=True)
class Offload:
    """Where experts lie.

    Attributes:
        way: `synchronous`, `moesys` (a ring) or `chosen`.
        slots: layers that fit where the model computes; of `chosen`, experts.
        keep: layers of a ring that stay.
    """

    way: str
    slots: int
    keep: int = 0


class RingMoE(MoE):
    """All experts of a layer, lent by a ring or by what copies them when they are needed."""

    has_weights = False
    number: int
    source: Layers

    def run_experts(self, x_ND: Tensor, routes: Routes) -> Tensor:
        """As `MoE.run_experts`."""
        x_LMD = self.by_expert(x_ND)
        w1_LDF, _, w2_LFD = self.source.acquire(self.number)
        y_LMD = self.products(x_LMD, w1_LDF, self.b1_LF, w2_LFD, self.b2_LD)
        self.source.release(self.number)
        return self.by_source(y_LMD, len(x_ND))


class ChosenMoE(MoE):
    """Only the experts that got a row of any rank; who did, the ranks tell one another, and the host reads."""

    has_weights = False
    number: int
    source: ChosenExperts

    def run_experts(self, x_ND: Tensor, routes: Routes) -> Tensor:
        """As `MoE.run_experts`; slots of the others are left as they are, since nobody reads them."""
        with region("exchange"):
            experts_TK = torch.div(routes.rows_TK, self.shape.capacity, rounding_mode="floor")  # dropped: -1
            counts_RL = all_to_all(count(experts_TK, self.shape.experts), self.group).view(self.group.size, -1)
            counts = read_ints(counts_RL.sum(0), "received_kept_by_expert")
        x_LMD = self.by_expert(x_ND)
        y_LMD = torch.empty_like(x_LMD)
        for expert, (w1_1DF, _, w2_1FD) in self.source.each(self.number, [e for e, c in enumerate(counts) if c]):
            one = slice(expert, expert + 1)
            y_LMD[one] = self.products(x_LMD[one], w1_1DF, self.b1_LF[one], w2_1FD, self.b2_LD[one])
        return self.by_source(y_LMD, len(x_ND))


def layout_of(shape: GPT2MoEShape, ranks: int, dtype: torch.dtype) -> ExpertLayout:
    """How the experts of a rank lie."""
    name = str(dtype).removeprefix("torch.")
    return ExpertLayout(len(shape.moe_blocks), shape.experts // ranks, shape.d_model, shape.d_ffn, name, matrices=2)


def offloaded(
    shape: GPT2MoEShape, group: Group, device: torch.device, dtype: torch.dtype, seed: int, offload: Offload
) -> tuple[GPT2MoE, Copies]:
    """The model of this rank with the weights of a plain one of the seed, and the copies of its experts, under way.

    Raises:
        InputError: slots that can't be, or a disk without room.
    """
    make_layer = ChosenMoE if offload.way == "chosen" else RingMoE
    model = GPT2MoE(shape, group, device, dtype, seed, make_layer)
    copies = _copies(model, seed, offload)
    ways = {"chosen": lambda: ChosenExperts(copies), "synchronous": lambda: Synchronous(copies)}
    source = ways.get(offload.way, lambda: Ring(copies, offload.keep))()
    for number, layer in enumerate(moe_layers(model)):
        layer.number, layer.source = number, source  # type: ignore[assignment]
    return model, copies


def moe_layers(model: GPT2MoE) -> list[MoE]:
    """The layers that have experts."""
    return [block.ffn for block in model.blocks if isinstance(block.ffn, MoE)]  # type: ignore[union-attr]


def _copies(model: GPT2MoE, seed: int, offload: Offload) -> Copies:
    like, group = model.tokens.weight, model.group
    layout = layout_of(model.shape, group.size, like.dtype)
    slot_bytes = layout.stride_bytes if offload.way == "chosen" else layout.layer_bytes
    if like.is_meta:
        return DescribedCopies(layout, offload.slots, slot_bytes)
    file = _opened(layout, _written(model, seed))
    if like.device.type == "cpu":
        return DiskCopies(file, offload.slots, slot_bytes)
    host = pinned_layers(file)
    file.close()
    return StreamCopies(layout, host, offload.slots, slot_bytes, like.device)


@torch.no_grad()
def _written(model: GPT2MoE, seed: int) -> Iterator[Weights]:
    """Give the model a plain one's weights; that one's experts, layer by layer."""
    like = model.tokens.weight
    plain = GPT2MoE(model.shape, model.group, like.device, like.dtype, seed)
    known = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.copy_(known[name])
    for layer in moe_layers(plain):
        yield layer.w1_LDF.detach().cpu(), None, layer.w2_LFD.detach().cpu()


def _opened(layout: ExpertLayout, layers: Iterator[Weights]) -> ExpertFile:
    """A file of experts without a name: nothing is left of it when the process ends."""
    with TemporaryDirectory(prefix="moebench-experts-") as folder:
        path = Path(folder) / "experts.bin"
        write_expert_file(path, layout, layers)
        with suppress(InputError):  # a file system without direct reads
            return ExpertFile(path)
        return ExpertFile(path, "drop")
