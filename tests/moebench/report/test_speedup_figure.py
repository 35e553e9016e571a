"""The figure of speedups: its legend in the order of sizes, its notes short."""

import re

import pandas as pd

from moebench.report.figures import speedup_figure

NO_MARKS = pd.DataFrame(columns=["gate", "batch_size", "value", "label"])


def texts(points):
    """What is written in the figure, in the order of the drawing."""
    return re.findall(r">([^<>]+)</text>", speedup_figure(points, NO_MARKS, "speedup", narrow=True))


def points(*rows):
    """Points at batch sizes, each a size, a batch size, a value or the reason why there is none."""
    return pd.DataFrame(
        [
            {"gate": "switch", "size": size, "batch_size": batch, "value": value if note == "" else float("nan"),
             "low": float("nan"), "high": float("nan"), "note": note}
            for size, batch, value, note in rows
        ]
    )  # fmt: skip


def test_sizes_stand_in_the_order_of_numbers():
    """Whatever ran first."""
    found = texts(points(*((size, 8, 2.0, "") for size in ("8x8", "4x8", "16x8", "1x8", "2x8"))))
    assert [text for text in found if "x8" in text] == ["1x8", "2x8", "4x8", "8x8", "16x8"]


def test_a_note_says_once_on_which_sizes_it_holds():
    """On all of them it needs no sizes; a long one is broken."""
    note = "a_rather_long_name out of memory"
    found = texts(points(("1x8", 8, 2.0, ""), ("2x8", 8, 0.0, note), ("1x8", 16, 0, note), ("2x8", 16, 0, note)))
    assert " ".join(found).count("a_rather_long_name") == 2
    assert sum("on 2x8" in text or text == "2x8" for text in found) == 2  # the legend, and the note at 8
    assert max(map(len, found)) <= 19
