"""What a claim's scope admits: names, lists, ranges and bounds."""

from dataclasses import replace

import pytest

from moebench.claims.reported import claims_of
from moebench.claims.scope import is_everything, named

CLAIM = claims_of("hetu")[0]


@pytest.mark.parametrize(
    ("text", "value", "admitted"),
    [
        ("32", 32, True),
        ("32", 64, False),
        ("8, 32", 32, True),
        ("switch", "switch", True),
        ("1e3..2e8", 1024, True),
        ("1e3..2e8", 1000, True),
        ("1e3..2e8", 2**28, False),
        ("1e3..2e8, 2**30", 2**28, False),
        ("<256", 255, True),
        ("<256", 256, False),
        ("<=256", 256, True),
        (">8", 8, False),
        (">=8", 8, True),
        ("<256", "switch", False),
        ("switch..topk", "switch", False),
        ("<many", 1, False),
        ("<2", True, False),
    ],
)
def test_a_scope_admits(text, value, admitted):
    """Numbers in a range with its ends, or within a bound; names as they are written."""
    assert named(replace(CLAIM, scope={"key": text}), "key", (value,)) is admitted


def test_what_a_scope_leaves_open_is_admitted():
    """Another key says nothing."""
    assert named(CLAIM, "bytes", (1,))


def test_everything_is_said_in_words():
    """`scope=all gates` means all cases; another key doesn't."""
    assert is_everything("scope", "All gates and batch sizes")
    assert is_everything("scope", "in general")
    assert not is_everything("scope", "")
    assert not is_everything("gate", "all")
