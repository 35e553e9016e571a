"""Signs of life: who is silent for too long, by its own word, and who is not."""

import pytest

from moebench.ranks import pulse


@pytest.fixture
def clock(monkeypatch):
    """A listener's clock, in seconds, moved by hand."""
    now = [100.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    return now


def silent_for(listener, clock, seconds):
    """Whether a listener finds that too long, looking every tick."""
    for _ in range(int(seconds / pulse.TICK_S)):
        clock[0] += pulse.TICK_S
        if listener.is_too_long():
            return True
    return False


def test_a_rank_may_be_silent_as_long_as_it_said(monkeypatch, tmp_path, clock):
    """First as long as whoever waits thinks, then as long as the rank has asked for last."""
    monkeypatch.setenv(pulse.VARIABLE, str(tmp_path / "pulse"))
    listener = pulse.Listener(tmp_path / "pulse", 10)
    assert not silent_for(listener, clock, 8)
    pulse.beat(30.0, "tiny/switch")
    assert not silent_for(listener, clock, 29)
    assert (listener.longest_s, listener.at) == (30.0, "tiny/switch")
    pulse.beat(3.0)
    assert silent_for(listener, clock, 5)
    assert (listener.longest_s, listener.at) == (3.0, "")


def test_without_a_word_the_first_limit_holds(tmp_path, clock):
    """A rank that never speaks."""
    assert silent_for(pulse.Listener(tmp_path / "pulse", 4), clock, 6)


def test_time_in_which_the_listener_stood_still_is_not_the_ranks(tmp_path, clock):
    """A machine that was asleep, or a stopped process group, wakes up to work that goes on."""
    listener = pulse.Listener(tmp_path / "pulse", 10)
    clock[0] += 3600
    assert not listener.is_too_long()
    assert silent_for(listener, clock, 10)


def test_nobody_listens(monkeypatch):
    """Then nothing is written."""
    monkeypatch.delenv(pulse.VARIABLE, raising=False)
    pulse.beat(1.0)


def test_a_place_that_takes_no_writing_stops_nobody(monkeypatch, tmp_path):
    """A rank does not fail for want of a sign."""
    monkeypatch.setenv(pulse.VARIABLE, str(tmp_path / "no" / "folder"))
    pulse.beat(1.0)
