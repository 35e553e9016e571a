"""No number of an exchange before every rank gets what the others sent, bit for bit."""

from types import SimpleNamespace

import pytest

from moebench.checks import exchanges as check_exchanges
from moebench.checks.exchanges import check
from moebench.ranks import run as ranks
from moebench.workloads.exchange import BYTES_PER_ELEMENT, EXCHANGES
from tests.moebench import exchange_functions


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path):
    """Every test starts without what earlier ones found."""
    monkeypatch.setattr("moebench.checks.correctness.cache_folder", lambda: tmp_path)


def case(name, dtype="fp32"):
    """What the check reads of a case."""
    return SimpleNamespace(system=name, workload=SimpleNamespace(dtype=dtype))


def statuses(*cases):
    return [(status.status, status.reason) for status in check(cases)]


def test_every_exchange_is_right_in_every_dtype():
    """On four real ranks as 2x2, forward, backward and a second run."""
    cases = [case(name, dtype) for name in EXCHANGES for dtype in BYTES_PER_ELEMENT]
    assert statuses(*cases) == [("passed", "")] * len(cases)


def test_what_passed_is_not_run_again(monkeypatch):
    """Remembered by exchange, dtype and the code."""
    starts = []
    real = ranks.run_ranks
    monkeypatch.setattr(ranks, "run_ranks", lambda *a, **k: starts.append(a) or real(*a, **k))
    assert statuses(case("leader"), case("2d")) == [("passed", "")] * 2
    assert statuses(case("2d"), case("leader")) == [("passed", "")] * 2
    assert len(starts) == 1


@pytest.mark.parametrize(("fault", "what"), [("order", "output"), ("gradient", "gradient")])
def test_a_wrong_exchange_is_told(monkeypatch, fault, what):
    """Which value is wrong, in which run, on which rank."""
    monkeypatch.setattr(check_exchanges, "TARGET", f"{exchange_functions.__name__}:run_wrong")
    [(status, reason)] = statuses(case(fault))
    assert status == "wrong"
    assert reason == f"{fault} in fp32, run 1 on 4 ranks, rank 0: the {what} is not what the ranks sent"


def test_an_exchange_that_fails_leaves_the_others(monkeypatch):
    """They are tried alone."""
    monkeypatch.setattr(check_exchanges, "TARGET", f"{exchange_functions.__name__}:fail_on")
    (passed, _), (failed, reason) = statuses(case("flat"), case("deadly"))
    assert (passed, failed) == ("passed", "failed")
    assert "no such way" in reason
