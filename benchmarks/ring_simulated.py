"""Ring memory on a described GPU, K from 1 to N, by tokens of a pass: python -m benchmarks.ring_simulated

Layers, experts and sizes are those of one of 16 GPUs under the one guess that fits the 58.2B parameters of MoESys'
ablation (hidden 4096, 24 layers with experts, 32 of them twice as wide, 2 of each layer on a GPU); its attention layers
between and the exchange between GPUs are left out, and an expert has a gate here, three matrices for two. Experts come
from pinned memory over the host link. A pass takes so many tokens: generation has one a sequence, a prompt all of its
own. Told is the time of a pass once the ring has no more that was copied beforehand, over that without offload.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moebench.program import Program
from moebench.sim.replay import replay
from moebench.sim.uncertainty import draw
from moebench.systems.moesys.copies import DescribedCopies
from moebench.systems.moesys.decoder import Decoder, empty_dense, expert_layout
from moebench.systems.moesys.ring import Ring, Synchronous
from moebench.systems.moesys.run_experts import WholeLayers
from moebench.trace.recorder import record_step
from moebench.workloads.load import load_topology
from moebench.workloads.machine import Topology
from moebench.workloads.models.decoder import DecoderModel, DecoderShape

SHARE = DecoderModel("share", "A GPU's share", 24, DecoderShape(4096, 32, 32, 128, 8192, 2, 1), 50304, tied=True)
TOKENS = (1, 64, 1024, 4096, 8192, 16384)
PASSES = 3  # of the shorter of two programs; what the longer takes more is the steady state
SAMPLES, SEED = 200, 0


@dataclass(frozen=True)
class Way:
    """`none`, `synchronous`, or a ring of `slots`, of which `keep` stay."""

    name: str
    slots: int
    keep: int = 0


def program_of(model: DecoderModel, way: Way, tokens: int, passes: int, dtype: str = "bfloat16") -> Program:
    """So many passes over the layers, each of so many tokens, a sequence each."""
    layout = expert_layout(model, dtype)
    copies = DescribedCopies(layout, way.slots, layout.layer_bytes)
    dense, ids = empty_dense(model, dtype), torch.empty(1, tokens, dtype=torch.int64, device="meta")
    persistent = [ids, dense.tokens_VD, dense.norm_D, *(one for layer in dense.layers for one in layer.parameters())]

    def run() -> None:
        experts = WholeLayers(Synchronous(copies) if way.name == "synchronous" else Ring(copies, way.keep))
        decoder = Decoder(model, dense, experts)
        for _ in decoder.stream(ids, passes):
            pass

    return record_step(run, persistent=[*persistent, *copies.slots]).program(0, 1)


def pass_s(model: DecoderModel, way: Way, tokens: int, topology: Topology) -> tuple[np.ndarray, int]:
    """Seconds of a pass in the steady state under every draw, and the peak of memory."""
    values, found, peak = draw(topology.parameters(), SAMPLES, SEED), [], 0
    for passes in (PASSES, 2 * PASSES):
        done = replay([program_of(model, way, tokens, passes)], topology, values, has_timelines=False)
        found.append(done.step_time_s)
        peak = done.peak_bytes
    return (found[1] - found[0]) / PASSES, peak


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring_simulated", description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="1x1-a100-80-nvme", help="of one GPU, with copy.bandwidth")
    options = parser.parse_args(arguments)
    topology, layers = load_topology(options.topology), SHARE.layers
    layout = expert_layout(SHARE, "bfloat16")
    print(f"{layers} layers of {layout.layer_bytes / 2**20:.0f} MiB of experts on {topology.title}")
    rings = [Way("ring", slots) for slots in (1, 2, 3, 6, 12, 23)]
    ways = [Way("synchronous", 1), *rings, Way("ring", 12, 10), Way("ring", 18, 16)]
    names = [f"K = {way.slots}{f', {way.keep} kept' if way.keep else ''}" for way in ways[1:]]
    print(f"{'tokens':>8}{'no offload':>12}" + "".join(f"{name:>16}" for name in ["when needed", *names]))
    for tokens in TOKENS:
        whole_s, peak = pass_s(SHARE, Way("none", layers), tokens, topology)
        cells = []
        for way in ways:
            took_s, own_peak = pass_s(SHARE, way, tokens, topology)
            cells.append(f"{took_s[0] / whole_s[0]:.2f} ({own_peak / peak - 1:+.0%})")
        print(f"{tokens:>8}{1e3 * whole_s[0]:>9.1f} ms" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    print("time over that without offload (nominal), and the change of peak memory")


if __name__ == "__main__":
    main()
