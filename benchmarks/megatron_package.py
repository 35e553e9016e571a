"""How our Megatron layers compare in time with the package they stand for: python -m benchmarks.megatron_package

Takes the installed megatron-core (`pip install --no-deps megatron-core==0.16.1` and `packaging`), whose layer runs on a
CPU once what it asks of CUDA has an answer (`without_a_gpu`): one rank, experts one after another, as its only expert
module without Transformer Engine. Processor time of forward and backward on one thread, the two sides in turns; ours
should take at most 1.1 of the package's.
"""

import contextlib
import os

os.environ.update(TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1")

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from moebench.kernels.collectives.group import described_group
from moebench.systems.interface import LayerWeights
from moebench.systems.registry import get
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload

Layer = Callable[[Tensor], tuple[Tensor, Tensor]]
SHAPES = ((2048, 16, 256, 256, 2), (2048, 16, 256, 256, 1), (512, 8, 128, 128, 3))  # T, E, D, F, K
ROUNDS, WARM_UP = 14, 2
MOE = "megatron.core.transformer.moe"


class _Stream:
    """A CUDA stream, or an event of one, on a machine that has none: everything has happened already."""

    def wait_stream(self, _: "_Stream") -> None:
        pass

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Megatron's questions to CUDA, answered for the CPU, and a name that core 0.16.1 lacks without its extension."""
    answers = {"current_stream": _Stream(), "stream": contextlib.nullcontext(), "current_device": torch.device("cpu")}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch("torch.cuda.Stream", _Stream))
        for name, answer in answers.items():
            patches.enter_context(mock.patch(f"torch.cuda.{name}", return_value=answer))
        patches.enter_context(mock.patch(f"{MOE}.moe_utils.te_general_gemm", None, create=True))
        patches.enter_context(mock.patch(f"{MOE}.token_dispatcher.maybe_move_tensor_to_cpu", _on_host))
        yield


def package_layer(
    workload: LayerWorkload, conventions: Conventions, dispatcher: str, weights: LayerWeights, **config: Any
) -> Layer:
    """The package's MoELayer on the ranks of the default process group; gives (y [T, D], auxiliary loss).

    The loss has no gradient here: the package lets it into that of y.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.spec_utils import build_module

    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    settings = _config(workload, conventions, dispatcher, **config)
    spec = get_moe_module_spec(use_te=False, num_experts=workload.experts, moe_grouped_gemm=False)
    layer = build_module(spec, config=settings, pg_collection=_groups())
    layer.set_layer_number(1)
    layer.train()
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 / dist.get_world_size()))
    with torch.no_grad():
        layer.router.weight.copy_(weights.gate_DE.t())
        for index, expert in enumerate(layer.experts.local_experts):
            first = weights.w1_LDF[index].t()
            if weights.w3_LDF is not None:
                first = torch.cat([first, weights.w3_LDF[index].t()])
            expert.linear_fc1.weight.copy_(first)
            expert.linear_fc2.weight.copy_(weights.w2_LFD[index].t())

    def call(x_TD: Tensor) -> tuple[Tensor, Tensor]:
        tracker = get_moe_layer_wise_logging_tracker()
        tracker.clear()
        y, _ = layer(x_TD.unsqueeze(1))
        losses = [entry["values"].sum() for entry in tracker.values()]
        return y.squeeze(1), conventions.auxiliary * sum(losses, start=torch.zeros(()))

    call.layer = layer  # type: ignore[attr-defined]
    return call


def _config(workload: LayerWorkload, conventions: Conventions, dispatcher: str, **config: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_swiglu = workload.activation == "swiglu"
    capacity = {} if conventions.is_dropless else {"moe_expert_capacity_factor": workload.capacity_factor}
    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": workload.d_model,
            "num_attention_heads": 1,
            "ffn_hidden_size": workload.d_ffn,
            "moe_ffn_hidden_size": workload.d_ffn,
            "num_moe_experts": workload.experts,
            "moe_router_topk": workload.gate.top_k,
            "moe_router_pre_softmax": conventions.normalisation == "none",
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": conventions.auxiliary,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_token_dispatcher_type": dispatcher,
            "expert_model_parallel_size": dist.get_world_size(),
            "add_bias_linear": False,
            "gated_linear_unit": is_swiglu,
            "activation_func": torch.nn.functional.silu if is_swiglu else torch.relu,
            "bias_activation_fusion": False,
            "use_cpu_initialization": True,
            "perform_initialization": False,
            "gradient_accumulation_fusion": False,
            **capacity,
            **config,
        }
    )


def _groups() -> Any:
    """Expert parallelism over all ranks, nothing else."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = ProcessGroupCollection()
    for name in ("ep", "tp_ep", "tp_dp_cp", "dp", "dp_cp"):
        setattr(groups, name, dist.group.WORLD)
    for name in ("tp", "cp", "expt_tp", "expt_dp", "tp_cp", "pp"):
        setattr(groups, name, alone)
    return groups


def random_weights(workload: LayerWorkload, held: int) -> LayerWeights:
    """Of `held` experts, the same on every call after the same seed."""
    d_model, d_ffn, experts = workload.d_model, workload.d_ffn, workload.experts
    w3_LDF = torch.randn(held, d_model, d_ffn) * d_model**-0.5 if workload.activation == "swiglu" else None
    return LayerWeights(
        torch.randn(d_model, experts),
        torch.randn(held, d_model, d_ffn) * d_model**-0.5,
        torch.randn(held, d_ffn, d_model) * d_ffn**-0.5,
        w3_LDF,
    )


def processor_time_s(layer: Layer, x_TD: Tensor, upstream_TD: Tensor) -> float:
    """One step."""
    x_TD = x_TD.clone().requires_grad_()
    start = time.process_time()
    y_TD, aux = layer(x_TD)
    outputs, gradients = [y_TD], [upstream_TD]
    if aux.requires_grad:
        outputs.append(aux)
        gradients.append(torch.ones(()))
    torch.autograd.backward(outputs, gradients)
    return time.process_time() - start


def main() -> None:
    """Print a line a dispatcher and shape."""
    import megatron.core

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"Megatron-Core {megatron.core.__version__}")
    for name, dispatcher in (("megatron", "alltoall"), ("megatron_allgather", "allgather")):
        for tokens, experts, d_model, d_ffn, top_k in SHAPES:
            workload = LayerWorkload(GateSpec("topk", top_k), 1, tokens, d_model, d_ffn, experts)
            conventions = get(name).as_shipped(workload.gate)
            weights = random_weights(workload, experts)
            ours = get(name).build(workload, described_group(1), conventions, torch.device("cpu"), torch.float32)
            ours.load_weights(weights)
            with without_a_gpu():
                sides = (package_layer(workload, conventions, dispatcher, weights), ours)
                x_TD, upstream_TD = torch.randn(tokens, d_model), torch.randn(tokens, d_model)
                times: tuple[list[float], list[float]] = ([], [])
                for turn in range(ROUNDS):
                    for side in (0, 1) if turn % 2 else (1, 0):
                        times[side].append(processor_time_s(sides[side], x_TD, upstream_TD))
            theirs_s, ours_s = (median(side[WARM_UP:]) for side in times)
            print(
                f"{dispatcher:9} T {tokens:5} E {experts:3} D {d_model:4} F {d_ffn:4} K {top_k}: "
                f"package {theirs_s * 1e3:6.1f} ms, ours {ours_s * 1e3:6.1f} ms, ratio {ours_s / theirs_s:.3f}"
            )


if __name__ == "__main__":
    main()
