"""One compiled form of a kernel: what a launch passes, without the tensors, so that it compiles without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Rows that a loop or a block counts in 32 bits: a block may reach beyond the last, and a step beyond that.
MOST_ROWS = 2**31 - 2**13


@dataclass(frozen=True)
class Variant:
    """What `benchmarks.aot_table` compiles.

    Attributes:
        name: unique within its operator: `permute bf16 D=4096`.
        kernel: the jit function.
        signature: argument -> type, for those that are no constants: `*bf16`, `i32`, `i64`, `fp32`.
        constants: constexpr argument -> value, as the launcher picks them.
        aligned: integer arguments that are divisible by 16; pointers always are.
        num_warps: on NVIDIA; `warps` says how many AMD's get.
        num_stages: of pipelined loops on NVIDIA; `stages` says how many AMD's get.
        is_product: must show tensor-core instructions (`wgmma` on sm_90, `mma.sync` on sm_80, `v_mfma` on gfx942).
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    is_product: bool = False


def stages(num_stages: int, is_amd: bool) -> int:
    """Stages of a pipelined loop: AMD's GPUs have 64 KB of shared memory, room for one tile ahead."""
    return min(num_stages, 2) if is_amd else num_stages


def warps(num_warps: int, is_amd: bool) -> int:
    """Warps of a block: AMD's have 64 threads, and a block has 1,024 at most on either."""
    return min(num_warps, 16) if is_amd else num_warps
