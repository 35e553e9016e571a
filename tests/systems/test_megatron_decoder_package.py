"""The dispatchers of Megatron's decoder of October 2024 against the real package, where core 0.9 is installed.

To run it: `pip install --no-deps megatron-core==0.9.0` and `pip install packaging`, then this file.
"""

from functools import cache
from importlib import metadata

import pytest
import torch

from moebench.ranks.run import run_ranks

try:
    VERSION = metadata.version("megatron-core")
except metadata.PackageNotFoundError:
    VERSION = ""

pytestmark = pytest.mark.skipif(not VERSION.startswith("0.9."), reason="megatron-core 0.9 is not installed")
TARGET = "tests.systems.megatron_decoder_package_on_ranks:both_dispatchers"


@cache
def both_sides(ranks, tensor):
    """What every rank says."""
    return run_ranks(TARGET, ranks, (tensor,), timeout_s=240)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_results_and_gradients_are_the_packages(ranks, tensor, dispatcher):
    """Of experts that multiply by a number of their own, on ranks that cut experts by number, by width, by both."""
    for of_rank in both_sides(ranks, tensor):
        for ours, theirs in zip(*of_rank[dispatcher], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
