"""The patched interpreter agrees with what a GPU computes: bf16, FP8, bounds of loops; what is counted."""

import torch
import triton
import triton.language as tl

from tests.interpreter.counter import count, counted


@triton.jit
def _scale_kernel(x, factor, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(x + places, mask=inside, other=0.0)
    tl.store(out + places, value * tl.load(factor), mask=inside)


@triton.jit
def _matmul_kernel(a, b, out, k, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for start in range(0, k, SIZE):
        left = tl.load(a + rows[:, None] * k + start + rows[None, :])
        right = tl.load(b + (start + rows[:, None]) * SIZE + rows[None, :])
        total += tl.dot(left, right, input_precision="ieee")
    tl.store(out + rows[:, None] * SIZE + rows[None, :], total)


@triton.jit
def _reduce_kernel(x, sums, maxima, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    block = tl.load(x + rows[:, None] * SIZE + rows[None, :])
    tl.store(sums + rows, tl.sum(block, 1))
    tl.store(maxima + rows, tl.max(block, 1))


@triton.jit
def _to_fp8_kernel(x, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out + places, tl.load(x + places).to(tl.float8e4nv))


def scale(x, factor, block=64):
    out = torch.empty_like(x)
    _scale_kernel[(triton.cdiv(x.numel(), block),)](x, factor, out, x.numel(), BLOCK=block)
    return out


def test_bf16_products_of_elements_are_rounded_to_nearest_even():
    """As torch computes them, bit for bit; what is masked is not written."""
    x = torch.randn(100).bfloat16()
    assert torch.equal(scale(x, torch.tensor(1.7).bfloat16()), x * torch.tensor(1.7).bfloat16())


def test_bf16_matrix_products_accumulate_in_fp32():
    """Along a loop whose bound is known at run time only."""
    a, b = torch.randn(16, 48).bfloat16(), torch.randn(48, 16).bfloat16()
    out = torch.empty(16, 16)
    _matmul_kernel[(1,)](a, b, out, 48, SIZE=16)
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


def test_bf16_reductions_are_of_values_not_of_bits():
    """Negative numbers too."""
    x = torch.randn(16, 16).bfloat16()
    sums, maxima = (torch.empty(16, dtype=torch.bfloat16) for _ in range(2))
    _reduce_kernel[(1,)](x, sums, maxima, SIZE=16)
    torch.testing.assert_close(sums.double(), x.double().sum(1), rtol=1e-2, atol=1e-2)
    assert torch.equal(maxima, x.amax(1))


def test_fp8_rounds_to_nearest_even_and_saturates():
    """As torch's own cast where it is in range, and the largest number where it isn't."""
    x = torch.cat([torch.randn(60) * 100, torch.tensor([1e-3, 448.0, 1e6, -1e6])])
    out = torch.empty(64, dtype=torch.float8_e4m3fn)
    _to_fp8_kernel[(1,)](x, out, SIZE=64)
    assert torch.equal(out.float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_unwritten_memory_is_poisoned():
    """NaN, or an integer that is no place of anything."""
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(2, dtype=torch.bfloat16)).isnan().all()
    assert torch.ones(2).new_empty(3, dtype=torch.float8_e4m3fn).float().isnan().all()
    assert (torch.empty(2, dtype=torch.int64) > 2**60).all()
    assert torch.empty(2, device="meta").is_meta


def test_counts_are_those_of_unmasked_lanes():
    """100 elements by two programs, each of which loads the factor for itself."""
    x = torch.randn(100)
    assert counted(scale, x, torch.ones(())) == (100 * 4 + 2 * 4, 100 * 4)
    assert counted(scale, x.bfloat16(), torch.ones((), dtype=torch.bfloat16)) == (100 * 2 + 2 * 2, 100 * 2)


def test_repeated_reads_of_a_launch_count_once_where_asked():
    """And the operators of torch beside the launch count by their rules."""
    x, factor = torch.randn(100), torch.ones(())
    traffic = count(lambda x: scale(x.clone(), factor), x)
    assert (traffic.loaded_once, traffic.stored_once) == (100 * 4 + 4 + 400, 100 * 4 + 400)
    assert (traffic.loaded, traffic.launches) == (100 * 4 + 8 + 400, 1)
