"""Ranks that sit somewhere else than on loopback's default, and what the caller finds out when they fail."""

import socket
import sys

import pytest

from moebench.ranks.run import RanksError, run_ranks
from moebench.ranks.seat import Seat
from tests.moebench.cluster.support import F

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seats are namespaces of Linux, loopback is called lo")


@pytest.fixture
def seats():
    """Two seats that need no rights: no namespace, loopback, a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    return [Seat((), "lo", ("127.0.0.1", port), alone | {"GROUP_RANK": str(rank)}) for rank in (0, 1)]


def test_ranks_meet_where_their_seats_say(seats):
    """By the store that rank 0 serves; each finds its own variables."""
    assert run_ranks(F + "place", 2, seats=seats) == [[0, 0, 2, 0, 1, 0, 2], [1, 1, 2, 0, 1, 1, 2]]


def test_a_namespace_that_is_gone_is_the_ranks_error(seats):
    """Named by its path."""
    gone = Seat(("/proc/self/ns/no-such",), "lo", seats[1].meeting, seats[1].environment)
    with pytest.raises(RanksError, match=r"rank 1 raised(.|\n)*No such file or directory: '/proc/self/ns/no-such'"):
        run_ranks(F + "place", 2, seats=[seats[0], gone])


def test_as_many_seats_as_ranks(seats):
    """Neither more nor fewer."""
    with pytest.raises(ValueError, match="2 seats for 3 ranks"):
        run_ranks(F + "place", 3, seats=seats)


def test_a_diagnosis_comes_first_and_only_after_a_failure(seats):
    """What the caller found out about the failure stands before what the ranks say."""
    asked = []

    def diagnose():
        asked.append(True)
        return ["somebody pulled a cable"]

    run_ranks(F + "place", 2, seats=seats, diagnose=diagnose)
    assert not asked
    with pytest.raises(RanksError) as error:
        run_ranks("tests.moebench.rank_functions:raises", 2, (1,), diagnose=diagnose)
    lines = [line for line in str(error.value).splitlines() if line]
    assert lines[1:3] == ["somebody pulled a cable", "rank 1 raised:"]


@pytest.mark.slow
def test_a_stopped_rank_is_named():
    """At the timeout, also on loopback, apart from those that waited for it."""
    run_ranks("tests.moebench.rank_functions:sums", 1, (0,))  # the rank server is there
    with pytest.raises(RanksError, match="rank 1 was stopped by a signal, and did not answer") as error:
        run_ranks(F + "stops", 3, (1,), timeout_s=5)
    assert "ranks 0, 1, 2 were not done after 5 s" in str(error.value)
