"""When copies hide: the formula against the ring step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.systems.moesys.hiding import LayerTimes, hides, layer_s, pass_ends_s, synchronous_s
from moebench.workloads.errors import InputError

TIMES = st.builds(LayerTimes, st.integers(0, 9), st.integers(0, 9), st.integers(0, 40))


@given(TIMES, st.integers(1, 7), st.data(), st.integers(1, 3))
def test_the_formula_is_the_rate_of_the_ring(times, layers, data, readers):
    """Of many passes, the last half: seconds a layer, for every number of slots and readers."""
    slots = data.draw(st.integers(1, layers))
    ends = pass_ends_s(times, layers, slots, passes=120, readers=readers)
    measured = (ends[-1] - ends[59]) / 60 / layers
    assert measured == pytest.approx(layer_s(times, layers, slots, readers), rel=1e-9, abs=1e-9)
    assert hides(times, layers, slots, readers) == (measured <= times.compute_s * (1 + 1e-9))


def test_copies_hide_behind_the_layers_between():
    """Up to (K - 1)(a + e) + a where copies run at once; one reader hides a + e at most, whatever K is."""
    for slots in range(1, 6):
        longest = (slots - 1) * 5.0 + 2.0
        assert hides(LayerTimes(2, 3, longest), 8, slots, readers=slots)
        assert not hides(LayerTimes(2, 3, longest + 0.1), 8, slots, readers=slots)
    assert [layer_s(LayerTimes(2, 3, 7), 8, slots) for slots in (1, 2, 7, 8)] == [10, 7, 7, 5]
    assert synchronous_s(LayerTimes(2, 3, 7)) == 12


def test_kept_layers_leave_fewer_copies():
    """8 layers of 5 s, copies of 7 s: with 4 kept the 4 others hide, with 2 they take 6 x 7 = 42 s a pass."""
    times = LayerTimes(2, 3, 7)

    def a_pass(slots, keep):
        ends = pass_ends_s(times, 8, slots, 40, keep)
        return (ends[-1] - ends[19]) / 20

    assert a_pass(4, 0) == pytest.approx(56)
    assert a_pass(4, 2) == pytest.approx(42)
    assert a_pass(6, 4) == pytest.approx(40)


def test_what_has_no_meaning_is_refused():
    """Negative times, no slots, more than layers."""
    with pytest.raises(ValueError, match="copy_s = -1"):
        LayerTimes(1, 1, -1)
    with pytest.raises(InputError, match="slots = 0"):
        layer_s(LayerTimes(1, 1, 1), 4, 0)
    with pytest.raises(InputError, match="slots = 5"):
        pass_ends_s(LayerTimes(1, 1, 1), 4, 5, 1)
