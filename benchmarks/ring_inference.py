"""Memory against time of generation whose experts are not all in memory: python -m benchmarks.ring_inference

A model of N MoE layers writes its experts into a file and generates with them in K = 1 to N slots of a ring, with no
offload, with copies when they are needed, with a ring that keeps layers, and with chosen experts only. All ways live in
one process, on the same threads, and run in random order, block by block; what is told is the median over the blocks
with a bootstrap 95 % interval, of the time of a token and of its ratio to no offload in the same block. A sample leaves
out the first tokens, for which a ring has copied layers beforehand. Two batches: a small one, whose compute is
shorter than the copies, and one just so large that a layer computes 1.3 times as long as its experts' copy takes.

On a CPU the tiers are disk and memory, and reads bypass the page cache unless --page-cache says otherwise; the model
computes on all cores but one. --device cuda has pinned memory and the GPU's. Takes --budget seconds and half a minute
more; keep the machine idle.
"""

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moebench.local.stats import Summary, summarise
from moebench.systems.megascale.routing import Routes
from moebench.systems.moesys.copies import pinned_layers
from moebench.systems.moesys.decoder import Decoder, DenseWeights, write_random_model
from moebench.systems.moesys.expert_file import PAGE_CACHES, ExpertFile, ExpertLayout
from moebench.systems.moesys.hiding import LayerTimes, layer_s, pass_ends_s, synchronous_s
from moebench.systems.moesys.offload import open_experts
from moebench.systems.moesys.ring import slots_within
from moebench.systems.moesys.run_experts import Experts, WholeLayers
from moebench.workloads.errors import InputError
from moebench.workloads.models.decoder import DecoderModel, DecoderShape
from moebench.workloads.units import BYTES, parse

TIMED = 4  # tokens of a sample, behind the lead-in
MOST_LEAD_IN = 12
ROOM = 1.3  # of the larger batch: compute of a layer over its copy
NEAR = 0.05  # within which times count as the same
LEAST_BLOCKS = 5
MIB = 1 << 20


@dataclass(frozen=True)
class Way:
    """One line of the table.

    Attributes:
        slots: layers in memory; of `chosen`, experts.
    """

    way: str
    slots: int
    keep: int = 0

    @property
    def name(self) -> str:
        """As printed."""
        names = {"none": "no offload", "synchronous": "when needed", "ring": f"ring, K = {self.slots}"}
        name = names.get(self.way, f"chosen, {self.slots} experts")
        return f"{name}, {self.keep} kept" if self.keep else name


@dataclass(frozen=True)
class Line:
    """What is told of a way at a batch.

    Attributes:
        token_s: time of a token; ratio: to no offload; predicted: that ratio by hiding.py, None where it says nothing.
        held_bytes: slots; seen_bytes: by which the process grew when they were filled, None on a GPU.
    """

    way: Way
    batch: int
    token_s: Summary
    ratio: Summary
    predicted: float | None
    held_bytes: int
    seen_bytes: int | None
    copied_bytes_a_token: float


def ways_of(layers: int, experts: int) -> list[Way]:
    """No offload first, rings from 1 to N - 1, one with kept layers, chosen experts of 1 and N / 2 layers."""
    found = [Way("none", layers), Way("synchronous", 1), *(Way("ring", slots) for slots in range(1, layers))]
    half = layers // 2
    if half >= 2:
        found.append(Way("ring", half, half - 1))
    return [*found, *(Way("chosen", count * experts) for count in sorted({1, max(1, half)}))]


def within(ways: Sequence[Way], layout: ExpertLayout, limit_bytes: float) -> list[Way]:
    """The ways that fit, and no offload, which the others are held against.

    Raises:
        InputError: one layer does not fit.
    """
    slots_within(layout, limit_bytes)

    def needed(way: Way) -> int:
        return way.slots * (layout.stride_bytes if way.way == "chosen" else layout.layer_bytes)

    return [way for way in ways if way.way == "none" or needed(way) <= limit_bytes]


def knee(ratio_by_slots: Mapping[int, float]) -> int:
    """The fewest slots from which more of them gain less than 5 %."""
    slots = sorted(ratio_by_slots)
    return next(k for k in slots if ratio_by_slots[k] <= (1 + NEAR) * min(ratio_by_slots[j] for j in slots if j >= k))


def seconds(call: Callable[[], object], device: torch.device, times: int = 3) -> float:
    """The median of so many calls."""
    found = []
    for _ in range(times):
        begin = _now(device)
        call()
        found.append(_now(device) - begin)
    return sorted(found)[times // 2]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _process_bytes() -> int:
    """Anonymous memory of this process that is in use."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Bench:
    """A model, the open ways of its experts, and what a sample of each takes."""

    def __init__(self, model: DecoderModel, dense: DenseWeights, file: ExpertFile, device: torch.device) -> None:
        self.model, self.dense, self.file, self.device = model, dense.to(device), file, device
        self.host = pinned_layers(file) if device.type == "cuda" else None
        self.opened: dict[Way, Experts] = {}
        self.seen_bytes: dict[Way, int | None] = {}

    def open(self, way: Way, stack: ExitStack) -> None:
        """Fill a way's slots, and keep it open; note by how much the process grew."""
        before = _process_bytes()
        options: dict[str, Any] = {"slots": way.slots, "keep": way.keep, "device": self.device, "host": self.host}
        self.opened[way] = stack.enter_context(open_experts(self.file, way.way, **options))
        if way.way in ("chosen", "synchronous"):
            self.sample(way, 2, 1)
        self.drain(way)
        self.seen_bytes[way] = _process_bytes() - before if self.device.type == "cpu" else None

    def drain(self, way: Way) -> None:
        """Let copies end that nobody waits for, so that they do not run beside another way."""
        copies = self.opened[way].copies
        for slot in range(len(copies.slots)):
            copies.wait_on_host(slot)

    def prompt(self, batch: int) -> Tensor:
        """One position of so many sequences."""
        generator = torch.Generator().manual_seed(batch)
        return torch.randint(self.model.vocabulary, (1, batch), generator=generator).to(self.device)

    def sample(self, way: Way, batch: int, lead_in: int) -> tuple[float, float, Tensor]:
        """Seconds and copied bytes of a token once the first ones are over, and the tokens."""
        experts = self.opened[way]
        decoder, found, begin, before = Decoder(self.model, self.dense, experts), [], 0.0, 0
        for number, ids in enumerate(decoder.stream(self.prompt(batch), lead_in + TIMED)):
            found.append(ids)
            if number == lead_in - 1:
                begin, before = _now(self.device), experts.copies.copied_bytes
        took = _now(self.device) - begin
        copied = experts.copies.copied_bytes - before
        self.drain(way)
        return took / TIMED, copied / TIMED, torch.cat(found).cpu()

    def times(self, batch: int) -> LayerTimes:
        """What a layer computes without and with its experts, and what a copy of them takes."""
        none, naive = Way("none", self.model.layers), self.opened[Way("synchronous", 1)]
        assert isinstance(naive, WholeLayers)
        layer = sorted(self.sample(none, batch, 1)[0] for _ in range(3))[1] / self.model.layers
        shape, like = self.model.shape, self.dense.norm_D
        h_TD = torch.randn(batch, shape.d_model, device=self.device, dtype=like.dtype)
        chosen = torch.rand(batch, shape.experts, device=self.device).topk(shape.top_k, 1).indices
        weights = torch.full(chosen.shape, 1 / shape.top_k, device=self.device)
        routes = Routes(chosen, weights, weights)

        def all_layers() -> None:
            for number in range(self.model.layers):
                self.opened[none].run(number, h_TD, routes)

        experts = min(layer, seconds(all_layers, self.device) / self.model.layers)

        def copies() -> None:
            for number in range(self.model.layers):
                naive.layers.acquire(number)

        return LayerTimes(layer - experts, experts, seconds(copies, self.device) / self.model.layers)


def batch_that_hides(bench: Bench) -> int:
    """The smallest of 16, 32, 48, 64, 96, ... sequences whose layer computes 1.3 times as long as its copy takes.

    Raises:
        InputError: none up to 16,384.
    """
    sizes = sorted({16 * 2**power * part // 2 for power in range(11) for part in (2, 3)})
    for batch in sizes:
        times = bench.times(batch)
        if times.compute_s >= ROOM * times.copy_s:
            return batch
    raise InputError(f"no batch up to {sizes[-1]} computes as long as a copy takes; take smaller experts")


def predicted_ratio(way: Way, times: LayerTimes, layers: int) -> float | None:
    """Of a way's time to no offload, by hiding.py."""
    if way.way == "chosen":
        return None
    if way.way == "synchronous":
        return synchronous_s(times) / times.compute_s
    if not way.keep:
        return layer_s(times, layers, way.slots) / times.compute_s
    ends = pass_ends_s(times, layers, way.slots, 40, way.keep)
    return (ends[-1] - ends[19]) / 20 / layers / times.compute_s


def lead_in(way: Way, times: LayerTimes, layers: int) -> int:
    """Tokens after which what a ring had copied beforehand is used up: it loses a slot in 1 / (1 - compute / copy)."""
    if way.way != "ring" or times.copy_s <= times.compute_s:
        return 1
    lost_a_layer = max(1 - times.compute_s / times.copy_s, 1 / MOST_LEAD_IN)
    return min(MOST_LEAD_IN, 1 + math.ceil(way.slots / lost_a_layer / layers))


def measure(bench: Bench, batch: int, times: LayerTimes, budget_s: float) -> list[Line]:
    """Blocks of all ways in random order until the time is over.

    Raises:
        RuntimeError: a way gave other tokens than no offload.
    """
    order, shuffler, layers = list(bench.opened), random.Random(batch), bench.model.layers
    none, begin = order[0], time.perf_counter()
    found: dict[Way, list[float]] = {way: [] for way in order}
    copied, tokens = {}, {}
    while len(found[none]) < LEAST_BLOCKS or time.perf_counter() - begin < budget_s:
        shuffler.shuffle(order)
        for way in order:
            took, copied[way], tokens[way] = bench.sample(way, batch, lead_in(way, times, layers))
            found[way].append(took)
    for way in order:
        count = min(len(tokens[way]), len(tokens[none]))
        if not torch.equal(tokens[way][:count], tokens[none][:count]):
            raise RuntimeError(f"{way.name} gave other tokens than no offload, batch {batch}")
    return [
        Line(
            way,
            batch,
            summarise([found[way]]),
            summarise([[one / other for one, other in zip(found[way], found[none], strict=True)]]),
            predicted_ratio(way, times, layers),
            bench.opened[way].held_bytes,
            bench.seen_bytes[way],
            copied[way],
        )
        for way in bench.opened
    ]


def told(lines: Sequence[Line], times: LayerTimes, layers: int) -> Iterator[str]:
    """The table of a batch, and the sentences below it."""
    whole = lines[0].held_bytes
    compute, experts, copy = (f"{1e3 * one:.2f} ms" for one in (times.compute_s, times.experts_s, times.copy_s))
    batch, blocks = lines[0].batch, lines[0].token_s.count
    yield f"batch {batch}: a layer computes {compute} (experts {experts}), a copy takes {copy}; {blocks} blocks"
    yield f"{'':22}{'of the':>8}{'grew by':>10}{'copied':>10}{'a token':>10}{'':>18}{'to no':>9}{'':>16}{'by':>9}"
    yield f"{'':22}{'memory':>8}{'MiB':>10}{'MiB':>10}{'ms':>10}{'95 %':>18}{'offload':>9}{'95 %':>16}{'formula':>9}"
    for line in lines:
        seen = "" if line.seen_bytes is None else f"{line.seen_bytes / MIB:.1f}"
        t, r = line.token_s, line.ratio
        formula = "" if line.predicted is None else f"{line.predicted:.2f}"
        yield (
            f"{line.way.name:22}{line.held_bytes / whole:>8.1%}{seen:>10}{line.copied_bytes_a_token / MIB:>10.1f}"
            f"{1e3 * t.median:>10.1f}{f'{1e3 * t.low:.1f} to {1e3 * t.high:.1f}':>18}"
            f"{r.median:>9.3f}{f'{r.low:.3f} to {r.high:.3f}':>16}{formula:>9}"
        )
    rings = {line.way.slots: line.ratio for line in lines if line.way.way == "ring" and not line.way.keep}
    if rings:
        yield _knee_sentence(rings, layers)


def _knee_sentence(rings: Mapping[int, Summary], layers: int) -> str:
    at = knee({slots: ratio.median for slots, ratio in rings.items()})
    ratio = rings[at]
    verdict = f"within {NEAR:.0%} of no offload" if ratio.high <= 1 + NEAR else f"not within {NEAR:.0%} of no offload"
    if ratio.low <= 1 + NEAR < ratio.high:
        verdict = f"around {NEAR:.0%} over no offload"
    return (
        f"knee: K = {at}; more slots below {layers} gain less than {NEAR:.0%}. There a token takes {ratio.median:.3f} "
        f"times as long as without offload ({ratio.low:.3f} to {ratio.high:.3f}): {verdict}, with {at / layers:.0%} of "
        "the memory"
    )


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.ring_inference", description=__doc__.splitlines()[0])
    for name, value in (("layers", 8), ("experts", 8), ("top-k", 2), ("d-model", 512), ("d-ffn", 512), ("heads", 8)):
        found.add_argument(f"--{name}", type=int, default=value)
    found.add_argument("--dtype", default="float32")
    found.add_argument("--batch", type=int, action="append", help="repeats; default 2 and one that hides")
    found.add_argument("--memory-limit", help="of experts, as 96MiB: leaves out what takes more but no offload")
    found.add_argument("--budget", type=float, default=160.0, help="seconds of measuring, all batches together")
    found.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    found.add_argument("--page-cache", choices=PAGE_CACHES, default="bypass")
    found.add_argument("--folder", type=Path, default=None, help="of the file of experts; default the temporary one")
    found.add_argument("--device", default="cpu")
    found.add_argument("-o", "--out", type=Path, help="write everything as JSON")
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print; what was measured."""
    torch.set_num_threads(options.threads)
    shape = DecoderShape(
        options.d_model, options.heads, options.heads, options.d_model // options.heads, options.d_ffn, options.experts,
        options.top_k,
    )  # fmt: skip
    model = DecoderModel("measured", "Measured", options.layers, shape, vocabulary=1024)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as stack:
        path = Path(folder) / "experts.bin"
        dense = write_random_model(path, model, options.dtype)
        file = ExpertFile(path, options.page_cache)
        stack.callback(file.close)
        bench = Bench(model, dense, file, torch.device(options.device))
        layout, ways = file.layout, ways_of(model.layers, shape.experts)
        if options.memory_limit is not None:
            ways = within(ways, layout, parse(options.memory_limit, BYTES, "--memory-limit").si)
        for way in ways:
            bench.open(way, stack)
        print(f"{layout.layers} layers of {layout.layer_bytes / MIB:.1f} MiB of experts, {options.threads} threads, "
              f"page cache {options.page_cache}, device {options.device}, torch {torch.__version__}")  # fmt: skip
        batches = options.batch or [2, batch_that_hides(bench)]
        found = []
        for batch in batches:
            times = bench.times(batch)
            lines = measure(bench, batch, times, options.budget / len(batches))
            print("", *told(lines, times, model.layers), sep="\n", flush=True)
            found.append({"batch": batch, "times": asdict(times), "lines": [asdict(line) for line in lines]})
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    settings = {name: value if isinstance(value, int | float) else str(value) for name, value in asked.items()}
    return {"settings": settings, "torch": torch.__version__, "layer_bytes": layout.layer_bytes, "batches": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parser().parse_args(arguments)
    try:
        found = run(options)
    except (InputError, OSError) as error:
        parser().exit(2, f"error: {error}\n")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
