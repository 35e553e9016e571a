"""A finding is a word about several cases: what the word of a draw is, given who was faster in each of them.

`slower` and `faster` say so of every case; where some are and others are not, the word is `mixed`.
"""

import numpy as np

SLOWER, FASTER, MIXED, NO_CASE = "slower", "faster", "mixed", "no case"
WORDS = (SLOWER, FASTER)  # that a claim about two sides may state


def words_over(speedups: np.ndarray) -> np.ndarray:
    """One word a draw, of points x draws of the baseline's time over ours; points without a value are left out."""
    known = ~np.isnan(speedups)
    with np.errstate(invalid="ignore"):
        slower = ((speedups < 1) | ~known).all(axis=0)
        faster = ((speedups > 1) | ~known).all(axis=0)
    words = np.select([~known.any(axis=0), slower, faster], [NO_CASE, SLOWER, FASTER], MIXED)
    return words.astype(object)
