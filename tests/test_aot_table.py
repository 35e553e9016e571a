"""Every Triton kernel compiled for three GPUs without one: no spills, tensor cores, nothing changed unseen."""

import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.aot_table import (
    COMMAND,
    Compiled,
    code_bytes,
    compile_variant,
    differences,
    problems,
    table_path,
    text_table,
    variants_by_operator,
    verdict,
)
from benchmarks.rows_csv import read_rows, write_rows

ROOT = Path(__file__).parent.parent
ROW = Compiled("grouped_gemm", "bf16 128x128x64", "sm_90", 168, 0, 98_304, "wgmma", 9_000)
PRODUCT = [("grouped_gemm", "bf16 128x128x64")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_compiled_is_what_the_table_says(tmp_path):
    """All variants for sm_80, sm_90 and gfx942 that have changed since, and one each, from a cold cache."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "benchmarks.aot_table", "--changed"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]


def test_what_the_table_has_under_its_key_is_not_compiled(monkeypatch):
    """Of a compilation by Triton's own key; whatever else a launch would compile is compiled.

    In the keys for AMD is where Triton is installed, so that they are known on the same place only.
    """
    triton = pytest.importorskip("triton")
    rows = read_rows(Compiled, table_path(triton.__version__))
    known = {row.key: row for row in rows}
    assert "" not in known

    def refuse(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(triton, "compile", refuse)
    name, variants = next(iter(variants_by_operator().items()))
    for target in ("sm_80", "sm_90"):
        assert compile_variant(name, variants[0], target, known) in rows
        for other in (replace(variants[0], num_warps=32), replace(variants[0], aligned=())):
            with pytest.raises(InterruptedError):
                compile_variant(name, other, target, known)
        with pytest.raises(InterruptedError):
            compile_variant(name, variants[0], target)


def test_a_clean_row_is_no_problem():
    """What follows finds faults because they are there."""
    assert problems([ROW], PRODUCT) == []
    assert problems([replace(ROW, tensor_cores="-")], []) == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (replace(ROW, spill_bytes=8), "spills 8 bytes"),
        (replace(ROW, shared_bytes=227 * 1024 + 1), "takes 232449 bytes of shared memory; a block has 232448"),
        (replace(ROW, tensor_cores="mma.sync"), "without wgmma (it shows mma.sync)"),
        (replace(ROW, target="gfx942", shared_bytes=0), "without v_mfma"),
    ],
)
def test_a_fault_is_named(row, words):
    """Each one line, with operator, variant and target."""
    (line,) = problems([row], PRODUCT)
    assert words in line
    assert line.startswith(f"grouped_gemm: bf16 128x128x64 on {row.target}")


def test_a_change_is_named_with_both_values():
    """New, gone and changed rows, and the command that writes the table."""
    other = replace(ROW, variant="fp32")
    assert differences([ROW], [ROW]) == differences([replace(ROW, key="moved")], [ROW]) == []
    assert differences([replace(ROW, registers=170), other], [ROW]) == [
        "grouped_gemm: bf16 128x128x64 on sm_90: registers 170, was 168",
        "grouped_gemm: fp32 on sm_90 is new",
    ]
    assert differences([], [ROW]) == ["grouped_gemm: bf16 128x128x64 on sm_90 is gone"]


def test_the_verdict_names_the_command(tmp_path, capsys):
    """With a table, changes fail; without one, faults alone do, and that is said."""
    path = tmp_path / "aot-triton-3.7.1.csv"
    assert verdict([ROW], PRODUCT, path, ()) == []
    assert "no table for this Triton version" in capsys.readouterr().out
    write_rows([ROW, replace(ROW, operator="permute")], path)
    assert verdict([ROW, replace(ROW, operator="permute")], PRODUCT, path, ()) == []
    assert verdict([ROW], PRODUCT, path, ["grouped_gemm"]) == []
    assert verdict([ROW], PRODUCT, path, ())[-1].endswith(COMMAND)


def test_the_table_is_there_for_the_installed_version():
    """Else the comparison above compares nothing."""
    triton = pytest.importorskip("triton")
    rows = read_rows(Compiled, table_path(triton.__version__))
    assert {row.target for row in rows} == {"sm_80", "sm_90", "gfx942"}
    assert "grouped_gemm" in text_table(rows)


def test_code_bytes_counts_executable_sections_only():
    """Two sections of 64-bit ELF headers, one of them code."""
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HH", header, 0x3A, 64, 2)
    kinds = ((6, 640), (2, 99))  # flags and size
    sections = b"".join(struct.pack("<IIQQQQIIQQ", 0, 1, flags, 0, 0, size, 0, 0, 0, 0) for flags, size in kinds)
    assert code_bytes(bytes(header) + sections) == 640
