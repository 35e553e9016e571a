"""The error for a value outside a list of choices."""

from moebench.workloads.errors import one_of


def test_choices_are_listed_in_order_numbers_by_size():
    """`8, 16, 64`, not `16, 64, 8`; names by letter, after a hint at the nearest."""
    assert str(one_of("batch size", 7, ["64", "8", "16", "8"])) == "unknown batch size 7; choose one of: 8, 16, 64"
    expected = "suite x: unknown gate 'swich' (did you mean switch?); choose one of: base, switch, topk-2"
    assert str(one_of("gate", "swich", ["topk-2", "switch", "base"], "suite x")) == expected
    assert str(one_of("gate", "x", [])).endswith("choose one of: none")
