"""How our DeepSpeed layers compare in time with the package they stand for: python benchmarks/deepspeed_package.py

Takes whichever DeepSpeed is installed: `deepspeed` is compared up to 0.19.3, `deepspeed_sparse` after. Processor time
of forward and backward on one thread, the two sides in turns; ours should take at most 1.1 of the package's.
"""

import os

os.environ.update(TORCHDYNAMO_DISABLE="1", DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", OMP_NUM_THREADS="1")

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from moebench.kernels.collectives.group import described_group
from moebench.systems.registry import get
from moebench.workloads.layer import GateSpec, LayerWorkload

GATES = (GateSpec("switch", 1), GateSpec("gshard", 2), GateSpec("topk", 3))
SHAPES = ((2048, 16, 256, 256), (512, 8, 128, 128))  # T, E, D, F
ROUNDS, WARM_UP = 12, 2


class Expert(nn.Module):
    """Two bias-free linear layers around a ReLU."""

    def __init__(self, d_model: int, d_ffn: int):
        super().__init__()
        self.first, self.second = nn.Linear(d_model, d_ffn, bias=False), nn.Linear(d_ffn, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Any leading dimensions."""
        return self.second(torch.relu(self.first(x)))


def package_layer(gate: GateSpec, experts: int, d_model: int, d_ffn: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The package's own layer with its defaults."""
    from deepspeed.moe import experts as stock
    from deepspeed.moe import sharded_moe

    router = sharded_moe.TopKGate(d_model, experts, k=gate.top_k, min_capacity=4)
    layer = sharded_moe.MOELayer(router, stock.Experts(Expert(d_model, d_ffn), experts), "ep_size_1", 1, experts)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x, None)
        return y, layer.l_aux

    return call


def processor_time_s(layer: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, upstream: Tensor) -> float:
    """One step."""
    x = x.clone().requires_grad_()
    start = time.process_time()
    torch.autograd.backward(layer(x), (upstream, torch.ones(())))
    return time.process_time() - start


def main() -> None:
    """Print a line a gate and shape."""
    import deepspeed

    torch.set_num_threads(1)
    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    system = get("deepspeed" if version <= (0, 19, 3) else "deepspeed_sparse")
    print(f"{system.name} against DeepSpeed {deepspeed.__version__}")
    for gate in GATES:
        for tokens, experts, d_model, d_ffn in SHAPES:
            workload = LayerWorkload(gate, 1, tokens, d_model, d_ffn, experts)
            conventions = system.as_shipped(gate)
            ours = system.build(workload, described_group(1), conventions, torch.device("cpu"), torch.float32)
            sides = (package_layer(gate, experts, d_model, d_ffn), ours)
            x, upstream = torch.randn(tokens, d_model), torch.randn(tokens, d_model)
            times: tuple[list[float], list[float]] = ([], [])
            for turn in range(ROUNDS):
                for side in (0, 1) if turn % 2 else (1, 0):
                    times[side].append(processor_time_s(sides[side], x, upstream))
            theirs_s, ours_s = (median(side[WARM_UP:]) for side in times)
            print(
                f"{gate.label:7} T {tokens:5} E {experts:3} D {d_model:4} F {d_ffn:4}: "
                f"package {theirs_s * 1e3:6.1f} ms, ours {ours_s * 1e3:6.1f} ms, ratio {ours_s / theirs_s:.3f}"
            )


if __name__ == "__main__":
    main()
