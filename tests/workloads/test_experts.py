"""The rule language of experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.workloads.errors import InputError
from moebench.workloads.load import experts_for


@pytest.mark.parametrize(
    ("rule", "world", "experts"),
    [
        ("16", 8, 16),
        ("world", 8, 8),
        ("2*world", 8, 16),
        ("2 * world", 8, 16),
        ("max(16, world)", 8, 16),
        ("max(16, world)", 32, 32),
        ("max(16,2*world)", 64, 128),
        ("max(world)", 4, 4),
        (" world ", 1, 1),
    ],
)
def test_a_rule_gives_its_experts(rule, world, experts):
    """Numbers, world, multiples of it, and the largest of several."""
    assert experts_for(rule, world) == experts


@pytest.mark.parametrize(
    "rule",
    ["", "worlds", "world+1", "world*2", "-1", "1.5", "0", "0*world", "max()", "max(16, )", "max(16", "min(16, world)",
     "max(max(1, 2), world)", "__import__('os')", "16 experts"],
)
def test_nonsense_is_refused_with_advice(rule):
    """The error names the rule and what may be written."""
    with pytest.raises(InputError, match=r"experts rule .*max\(16, world\)"):
        experts_for(rule, 8)


def test_a_world_without_ranks_is_refused():
    """Zero ranks have no experts."""
    with pytest.raises(InputError, match="world = 0"):
        experts_for("world", 0)


@given(st.integers(1, 1024), st.integers(1, 64), st.integers(1, 512))
def test_a_maximum_is_the_largest_of_its_terms(world, factor, number):
    """max(a, b) equals the larger of the rules a and b."""
    rules = (str(number), f"{factor}*world")
    assert experts_for(f"max({', '.join(rules)})", world) == max(experts_for(rule, world) for rule in rules)
