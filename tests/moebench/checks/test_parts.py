"""No number of a part before every rank gets what its definition says."""

from types import SimpleNamespace

import pytest

from moebench.checks import parts as check_parts
from moebench.checks.parts import check, trial
from moebench.systems.part_registry import COUNTS
from moebench.workloads.part import PARTS, workload_of
from tests.moebench import part_functions

SIZES = {"tokens": 64, "d_model": 8, "top_k": 2, "steps": 1}
SIZES |= {"attention_mb": 1, "expert_mb": 1, "sent_percent": 1, "of_part": 0}
SIZES |= {"vocabulary": 30, "sequences": 1, "prompt": 1, "generated": 1, "capacity_percent": 100}
SIZES |= {"experts": 8, "layers": 1, "turn_steps": 0, "passes": 1, "cache_sizes": 1}
SIZES |= {"heads": 1, "positions": 2, "recomputed": 0}
SIZES |= {"d_ffn": 8, "accumulated": 1}


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path):
    """Every test starts without what earlier ones found."""
    monkeypatch.setattr("moebench.checks.correctness.cache_folder", lambda: tmp_path)


def cases(studied=False):
    """A case of every part by every system, and with one product where there may be one."""
    found = []
    for name, part in PARTS.items():
        finer = [f"chunked+chunks={n}" for n in (3, 16)] if "chunked" in part.systems else []
        finer += [
            f"{stem}+{option}={word}"
            for stem, options in part.options.items() for option, one in options.items() for word in one.words
        ]  # fmt: skip
        for system in [*part.systems, *finer] if part.is_studied == studied else ():
            for products in (1, 2) if "products" in part.sizes and system == "serial" else (2,):
                sizes = {**SIZES, "products": products, "parameters": 100}
                workload = workload_of(name, sizes, "mixtral-8x7b", batches=(3, 2))
                found.append(SimpleNamespace(system=system, workload=workload))
    return found


@pytest.fixture(autouse=True)
def any_case(monkeypatch):
    """The check reads the workload of a case alone."""
    monkeypatch.setattr(check_parts, "of_part", lambda case: case.workload)


def test_every_part_is_right_by_every_system():
    """On four real ranks as 2x2, twice; what is studied is tried as what it studies, and then known."""
    counted = [case for case in cases(studied=True) if case.workload.part in COUNTS]
    found = [(status.status, status.reason) for status in check([*cases(), *counted])]
    assert found == [("passed", "")] * len(found)
    assert {trial(case)[0] for case in cases(studied=True)} == {"gradient-sum", "parameter-gather", "row-sum", *COUNTS}


def test_every_part_that_is_wrong_is_told(monkeypatch):
    """One result on one rank, off by a tenth."""
    monkeypatch.setattr(check_parts, "TARGET", f"{part_functions.__name__}:run_spoiled")
    last = list({case.workload.part: case for case in cases()}.values())  # one system of each part
    for case, status in zip(last, check(last), strict=True):
        assert status.status == "wrong", (case, status)
        assert status.reason.startswith(f"{case.workload.part} by {case.system}, run 1 on 4 ranks, rank 3: ")
