"""What it takes to run a part by itself: one call on this rank, and how to tell whether what came out is right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.host import Answer
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.models.decoder import DecoderShape
from moebench.workloads.part import PARTS, Option, PartWorkload

TILE_ROWS = 128  # of a product's output that one block of a GPU makes
SEQUENCE = 8192  # positions of a sequence; of fewer tokens there is one sequence of all


@dataclass(frozen=True)
class Setting:
    """A part on a rank.

    Attributes:
        system: one of the part's, with options: `chunked+chunks=4`.
        shape: of the decoder, where the part has one.
        dtype: of what it works on; by default the workload's.
        tile: rows of a rank in a chunk of `fused`.
    """

    workload: PartWorkload
    system: str
    group: Group
    device: torch.device
    dtype: torch.dtype
    shape: DecoderShape | None = None
    tile: int = TILE_ROWS

    @property
    def decoder(self) -> DecoderShape:
        """The shape, which must be there."""
        assert self.shape is not None
        return self.shape

    @property
    def is_meta(self) -> bool:
        """Whether it is only traced."""
        return self.device.type == "meta"

    @property
    def tokens(self) -> int:
        """T, of this rank."""
        return self.workload.size("tokens") // self.group.size

    @property
    def chunks(self) -> int:
        """Into which a rank's rows are cut."""
        stem, options = parsed(self.workload.part, self.system)
        return max(1, self.tokens // self.tile) if stem == "fused" else number(options, "chunks", 1)

    def numbers(self, what: int, rank: int, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        """Normal numbers: those of a rank, so that every rank can tell what another one has."""
        if self.is_meta:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator().manual_seed(((self.workload.seed + 1) * 1009 + what) * 100_003 + rank)
        return (torch.randn(shape, generator=generator) * scale).to(self.device, self.dtype)


@dataclass(frozen=True)
class PartCall:
    """A part that is ready to run again and again.

    Attributes:
        run: one call.
        wrong: of what it returned, on real tensors: what is not as the definition says, or None; where a call destroys
            its input, that of the first one.
        persistent: tensors that live from call to call.
        reads: answers what it reads on the host where tensors have no values.
        is_fused: whether its chunks stand for the tiles of one kernel.
        alike: ranks that run the same program as this one; None: all do, or differ by their place only.
        turns: after so many calls it does the same again; 1: every call does.
    """

    run: Callable[[], Any]
    wrong: Callable[[Any], str | None]
    persistent: tuple[Tensor, ...]
    reads: Answer | None = None
    is_fused: bool = False
    alike: tuple[int, ...] | None = None
    turns: int = 1


@dataclass(frozen=True)
class Seat:
    """What a rank does in a part of tasks.

    Attributes:
        reads: samples of each task that it reads, by its place in the batches, and takes through what is shared.
        works: samples of each task that go through its networks on this rank.
        holds: tasks whose own networks it has.
    """

    reads: tuple[tuple[int, int], ...]
    works: tuple[tuple[int, int], ...]
    holds: tuple[int, ...]


def parsed(part: str, system: str) -> tuple[str, dict[str, int | str]]:
    """The name and the options of a part's system, `chunked+chunks=4`: those that are on, defaults among them.

    Raises:
        InputError: a system or an option that is not there, twice the same, or a value that it can't have.
    """
    stem, *pairs = system.split("+")
    if stem not in PARTS[part].systems:
        raise one_of(f"system of {part}", stem, PARTS[part].systems)
    known, named = PARTS[part].options.get(stem, {}), {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in known:
            has = f"{stem} has {', '.join(known)}, as in {_example(stem, known)}" if known else f"{stem} has none"
            raise InputError(f"system {system!r}: no option {name!r}; {has}")
        if name in named:
            raise InputError(f"system {system!r}: {name} stands there twice")
        named[name] = _value(system, name, text, known[name])
    defaults = {name: option.default for name, option in known.items() if option.default is not None}
    return stem, defaults | named


def number(options: Mapping[str, int | str], name: str, otherwise: int = 0) -> int:
    """A number among options that were parsed; another one where that is off."""
    return int(options.get(name, otherwise))


def _example(stem: str, known: Mapping[str, Option]) -> str:
    name, option = next(iter(known.items()))
    return f"{stem}+{name}={option.words[0] if option.words else 4}"


def _value(system: str, name: str, text: str, option: Option) -> int | str:
    if option.words:
        if text not in option.words:
            raise one_of(f"{name} of system {system!r}", text, option.words)
        return text
    if not text.isdecimal() or int(text) < option.least:
        raise InputError(f"system {system!r}: {name}={text} is no whole number of at least {option.least}")
    return int(text)


def far(what: str, ours: Tensor, theirs: Tensor, close: float = 1e-9) -> str | None:
    """What of a result is further from the definition than `close` of its largest magnitude, or None."""
    if ours.shape != theirs.shape:
        return f"{what} has shape {list(ours.shape)}, not {list(theirs.shape)}"
    if not theirs.numel():
        return None
    off = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-30))
    return None if off <= close else f"{what} is off by {off:.2g} of the largest"


def positions_of(tokens: int) -> int:
    """S: of sequences of `SEQUENCE` positions, where the tokens are whole ones."""
    return SEQUENCE if tokens and tokens % SEQUENCE == 0 else tokens
