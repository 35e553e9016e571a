"""Whom a report of failed ranks blames."""

from moebench.cluster.blame import Blame, CaseFailed, blame, first_cause

TITLE = "worker:measure on 2 ranks failed\n\n"
NAMED = f"CaseFailed: {CaseFailed('out-of-memory', 'tiny/switch/b1/a', 'not enough: 3 GiB')}"
LOST = "rank 0 raised: worker.CaseFailed: failed: tiny/switch/b1/a: RuntimeError: Connection closed by peer"


def test_a_rank_that_raises_in_a_case():
    """Its status, its case, and its own words rather than those of peers that lost it."""
    report = f"{TITLE}rank 1 raised:\nTraceback\n\nThe above exception\n\nTraceback\nworker.{NAMED}\n\n{LOST}"
    assert blame(report) == Blame("tiny/switch/b1/a", "out-of-memory", "rank 1: not enough: 3 GiB")


def test_a_rank_that_is_killed():
    """Its peers know which case it was; the cause is how it ended."""
    report = f"{TITLE}rank 1 was killed by SIGKILL, without a traceback; its last output:\nso long\n\n{LOST}"
    assert blame(report) == Blame("tiny/switch/b1/a", "failed", "rank 1 was killed by SIGKILL")


def test_a_rank_that_raises_outside_of_any_case():
    """Its last line, even where a peer names a case."""
    report = f"{TITLE}rank 1 raised:\nTraceback\nImportError: no module\n\n{LOST}"
    assert blame(report) == Blame("tiny/switch/b1/a", "failed", "rank 1: ImportError: no module")


def test_ranks_that_are_late():
    """Nobody names a case; who did not answer comes first."""
    late = "ranks 0, 1 were not done after 3 s\n\nrank 0 stood at:\n  File"
    assert blame(TITLE + late) == Blame(None, "failed", "ranks 0, 1 were not done after 3 s")
    cut = "rank 1 (node 1, 10.77.0.2) did not answer: its NIC (eth0) is down"
    assert blame(f"{TITLE}{cut}\n\n{late}").reason == cut


def test_a_report_of_another_form_is_its_own_reason():
    """Nothing is lost."""
    assert blame("the rank server died with status 1").reason == "the rank server died with status 1"


def test_the_first_cause_has_its_place():
    """The innermost line of the rank that failed first, if one raised; the words alone of what did not."""
    report = (
        "m:f on 2 ranks failed\n\nrank 1 raised:\nTraceback (most recent call last):\n"
        '  File "/x/a.py", line 3, in f\n    g()\n  File "/x/b.py", line 7, in g\n    1 / 0\nZeroDivisionError: no\n\n'
        'rank 0 raised:\n  File "/x/c.py", line 9, in h\nValueError: lost'
    )
    assert first_cause(report) == "rank 1: ZeroDivisionError: no (b.py, line 7)"
    assert first_cause("rank 2 died of signal 9") == "rank 2 died of signal 9"
