"""HetuMoE's and Tutel's running sums in Triton, alone and inside their positions."""

import pytest
import torch

from moebench.kernels.assign_slots import CHOICE_ORDERS, assign_slots_reference
from moebench.kernels.cost import declared_cost
from moebench.kernels.cumsum_positions import _torch_column_scan, hetu_positions, tutel_positions
from moebench.kernels.implementation import use_implementation
from moebench.kernels.triton import cumsum_positions as launchers
from tests.interpreter.counter import count

SCANS = [launchers.hetu_column_scan, launchers.tutel_column_scan]


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (1, 1), (40, 3), (33, 100), (9, 1000), (2100, 3)])
def test_the_scan_equals_torch(scan, rows, columns):
    """One and several programs, part of a program, several steps of a block, no row."""
    mask = torch.randint(0, 2, (rows, columns), dtype=torch.int32)
    assert torch.equal(scan(mask), _torch_column_scan(mask))
    transposed = torch.randint(0, 2, (columns, rows), dtype=torch.int32).t()
    assert torch.equal(scan(transposed), _torch_column_scan(transposed))


@pytest.mark.parametrize("function", [hetu_positions, tutel_positions])
@pytest.mark.parametrize("order", CHOICE_ORDERS)
@pytest.mark.parametrize("capacity", [None, 4])
def test_positions(function, order, capacity):
    """The definition of `assign_slots`, wild ids included."""
    ids = torch.randint(-1, 7, (50, 3))
    ids[0, 0], ids[7, 1], ids[20, 2] = 2**32, -(2**63), 6
    with use_implementation("triton"):
        got = function(ids, 5, order, capacity)
    expected = assign_slots_reference(ids, 5, order, capacity)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("scan", SCANS)
def test_bytes_are_those_declared(scan):
    """The mask once in, the places once out."""
    mask = torch.randint(0, 2, (30, 70), dtype=torch.int32)
    traffic = count(scan, mask)
    cost = declared_cost(f"moebench::{scan.__name__}")(mask, mask)
    assert (traffic.loaded, traffic.stored, traffic.launches) == (cost.bytes_read, cost.bytes_written, 1)
