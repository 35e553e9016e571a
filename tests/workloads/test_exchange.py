"""Exchanges as a workload, and the suite files that ask for them."""

import pytest

from moebench.kernels.collectives.exchanges import EXCHANGES as BUILT
from moebench.workloads.dtypes import TORCH_DTYPES
from moebench.workloads.errors import InputError
from moebench.workloads.exchange import (
    BYTES_PER_ELEMENT,
    EXCHANGES,
    MESSAGES,
    ExchangeWorkload,
    size_label,
    size_words,
)
from moebench.workloads.load import load_suite, load_topology
from moebench.workloads.load_suite import to_file
from tests.workloads.files import written

TEXT = """
schema_version = 1
title = "Ours"
paper = "none"

[[experiments]]
kind = "exchange"
name = "ours"
title = "Exchanges"
question = "Which one?"
metric = "collective_time"
exchanges = ["flat", "2d"]
payloads = ["1 MiB", "4 KiB", "64 MiB"]
sizes = ["2x4"]
node_types = ["titan-rtx"]
also = ["2x8-h100"]
"""


def test_names_and_dtypes_are_those_of_the_kernels():
    """Planning lists them without torch; nothing is missing and nothing more is promised."""
    assert list(EXCHANGES) == list(MESSAGES) == list(BUILT)
    for name, size in BYTES_PER_ELEMENT.items():
        assert TORCH_DTYPES[name].itemsize == size


def test_a_size_reads_like_a_person_writes_it():
    """Exact in a case's name, three digits in a sentence."""
    assert [size_label(n) for n in (1, 1000, 1024, 1536, 16 * 2**20, 2**30)] == [
        "1B", "1000B", "1KiB", "1536B", "16MiB", "1GiB",
    ]  # fmt: skip
    assert [size_words(n) for n in (12, 1024, 147_804, 1000 * 2**10, 1.34 * 2**20)] == [
        "12 B", "1 KiB", "144 KiB", "1000 KiB", "1.34 MiB",
    ]  # fmt: skip


def test_labels_name_payload_and_unusual_dtype():
    """fp32 goes without saying."""
    assert ExchangeWorkload(2**24).labels == (("16MiB",), ())
    assert ExchangeWorkload(2**24, "bf16").labels == (("16MiB-bf16",), ())


def test_a_payload_is_shared_out_in_whole_elements():
    """What is left over is not sent; less than an element a rank, or one rank, has no meaning."""
    assert ExchangeWorkload(1024).elements_per_peer(128) == 2
    assert ExchangeWorkload(1000).elements_per_peer(24) == 10
    assert ExchangeWorkload(1024).problem(256) is None
    assert "payload = 1KiB: 512 ranks need 4 bytes" in ExchangeWorkload(1024).problem(512)
    assert "needs two ranks" in ExchangeWorkload(1024).problem(1)


def test_a_suite_lists_payloads_with_their_units(tmp_path):
    """The first is the default, all of them run rising; topologies beside the grid come last."""
    [ours] = load_suite(str(written(tmp_path, TEXT))).experiments
    assert (ours.payload_bytes, ours.payloads_bytes) == (2**20, (4096, 2**20, 2**26))
    assert ours.topologies == ("2x4-titan-rtx", "2x8-h100")
    assert ours.systems == ours.exchanges == ("flat", "2d")
    assert ours.dtypes == ("fp32",)


def test_a_suite_is_what_its_file_says(tmp_path):
    """Written out and read again it is the same, the default payload first."""
    suite = load_suite(str(written(tmp_path, TEXT)))
    [part] = to_file(suite)["experiments"]
    assert part["payloads"] == ["1048576 B", "4096 B", "67108864 B"]
    assert part["also"] == ["2x8-h100"]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"flat", "2d"', '"flat", "3d"', "unknown exchange '3d'"),
        ('"4 KiB"', '"4 KB/s"', "payloads"),
        ('"4 KiB"', "4096", "has no unit"),
        ('"4 KiB"', '"1 MiB"', "1 MiB stands there twice"),
        ('"4 KiB"', '"0 B"', "payload of 0 bytes"),
        ('"4 KiB"', '"2 TiB"', "between 1 B and 1 TiB"),
        ('"2x8-h100"', '"h100"', "is not a topology"),
        ('metric = "collective_time"', 'metric = "step_time"', "unknown metric"),
        ('also =', 'dtypes = ["fp8"]\nalso =', "unknown dtype 'fp8'"),
        ("also =", 'figure = { kind = "condition-map", baseline = "leader" }\nalso =', "unknown baseline 'leader'"),
    ],
)
def test_faults_name_the_key_and_the_choices(tmp_path, old, new, error):
    """One line for each."""
    assert old in TEXT
    with pytest.raises(InputError, match=error):
        load_suite(str(written(tmp_path, TEXT.replace(old, new))))


def test_the_hetu_suite_covers_the_claims_and_their_contradictors():
    """1 KiB to 1 GiB on 2x8 to 16x8, and the machines that others measured on; 16 MiB where nobody said."""
    [found] = [e for e in load_suite("hetu").experiments if e.kind == "exchange"]
    assert found.payloads_bytes[0] == 2**10
    assert found.payloads_bytes[-1] == 2**30
    assert found.payload_bytes == 2**24
    assert found.sizes == ("2x8", "4x8", "8x8", "16x8")
    assert set(found.exchanges) == set(EXCHANGES)
    assert {"8x4-rtx-2080-ti", "16x8-ndm-a100-v4"} <= set(found.also)
    for name in found.topologies:
        ranks = load_topology(name).ranks
        assert all(ExchangeWorkload(size).problem(ranks) is None for size in found.payloads_bytes)
