"""The paper's formulas: its own numbers, and which way for which number of choices."""

import pytest

from moebench.systems.megascale.volumes import Sizes, crossover, experts_by, overlap_ratio, printed, sent, sync_ratio

MODELS = {"m1": (4096, 4, 3), "m3": (6144, 6, 2), "m4": (6400, 10, 1), "m6": (2048, 1, 6)}


@pytest.mark.parametrize(
    ("model", "tp", "sp", "ep"),
    [("m1", 117.4, 36.7, 44.0), ("m3", 176.2, 51.4, 44.0), ("m4", 183.5, 50.5, 22.9), ("m6", 58.7, 29.4, 44.0)],
)
def test_megabytes_of_a_layer(model, tp, sp, ep):
    """Table 2's models on 8 ranks, 8,192 tokens of BF16, as papers/megascale.md derives them."""
    d_model, ratio, top_k = MODELS[model]
    sizes = Sizes(1, 8192, d_model, 8, ratio, top_k)
    found = [2e-6 * printed(sizes, what) for what in ("attention-tp", "attention-sp", "experts-ep-a2a")]
    assert found == pytest.approx([tp, sp, ep], rel=2e-3)
    assert printed(sizes, "experts-tp") == printed(sizes, "experts-ep-ag") == printed(sizes, "attention-tp")
    assert 2 * sent(sizes, "attention-sp") == printed(sizes, "attention-sp")
    assert sent(sizes, "attention-dp") == 0


def test_the_crossover_is_computed():
    """Equal rates: n choices, the printed rule; with the rates of Fig 7 at 16,384 tokens it is between 5 and 7."""
    assert crossover(8) == 8
    assert [experts_by(k, 8) for k in (1, 8, 9)] == ["ep-a2a", "ep-a2a", "ep-ag"]
    rows = 16384 * 4096 * 2 / 8
    all_to_all, gather = rows * 6 * 7 / 8 / 752e-6, rows * 7 / 768e-6
    assert 5.5 < crossover(8, all_to_all, gather) < 6.5
    assert experts_by(7, 8, all_to_all, gather) == "ep-ag"


def test_ratios():
    """Eq 9 on an H800's links and Eq 10 in the appendix's example."""
    assert overlap_ratio(14336, 200e9, 989e12, 8) == pytest.approx(4.97, abs=0.01)
    assert overlap_ratio(1408, 155e9, 989e12, 8) == pytest.approx(0.38, abs=0.01)
    assert [round(sync_ratio(8, d, 450e9, 50e9), 2) for d in (2, 4, 8)] == [0.64, 0.96, 1.12]


@pytest.mark.parametrize(
    "call",
    [
        lambda: Sizes(0, 1, 1, 1, 1, 1), lambda: printed(Sizes(1, 1, 1, 1, 1, 1), "attention"),
        lambda: crossover(8, 0), lambda: overlap_ratio(8, 1, 1, 1), lambda: sync_ratio(1, 2, 1, 1),
    ],
)  # fmt: skip
def test_bad_input(call):
    """One ValueError each."""
    with pytest.raises(ValueError, match=r"must be|choose one of|too small"):
        call()
