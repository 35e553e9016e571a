"""Every listed kernel has a reference and a fast form with the same arguments, and operators declare their costs."""

import inspect

import pytest
import torch

from moebench.kernels.cost import declared_cost
from moebench.kernels.registry import KERNELS

OPERATORS = (
    "topk_gate", "topk_gate_backward", "assign_slots", "permute", "unpermute", "unpermute_backward", "attention",
    "attention_backward", "quantise_fp8", "dequantise_fp8", "activation", "activation_backward", "grouped_gemm",
    "grouped_gemm_dw", "choice_scatter", "choice_gather", "choice_dots", "topk", "hetu_topk", "hetu_column_scan",
    "tutel_column_scan", "rms_norm", "rms_norm_backward", "rope",
)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_implementations_take_the_same_arguments(kernel):
    """An implementation can be exchanged for another by name."""
    assert {"reference", "torch"} <= kernel.implementations.keys()
    names = [list(inspect.signature(function).parameters) for function in kernel.implementations.values()]
    assert all(arguments == names[0] for arguments in names)
    assert kernel.formula


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_declares_its_cost(operator):
    """No fused operator is priced by guesswork."""
    assert hasattr(torch.ops.moebench, operator)
    assert declared_cost(f"moebench::{operator}") is not None


def test_an_unknown_operator_has_no_cost():
    """Asking for the cost of an operator that declared none gives None."""
    assert declared_cost("moebench::nothing") is None
