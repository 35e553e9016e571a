"""Which experts the tokens of a part choose, as a suite says it: `zipf-1.5`, `trained`, or a recorded file.

No layer is computed: what counts is who is asked for, step by step and layer by layer. Plain data, no torch.
"""

from pathlib import Path

from moebench.workloads.errors import InputError
from moebench.workloads.layer import RoutingSpec

ZIPF, TRAINED, SUFFIX = "zipf-", "trained", ".npz"
LAYER = "{layer}"  # in the name of a recorded file: one of each layer
MOST_ALPHA = 100.0


def checked(text: str, folder: Path | None = None) -> str:
    """A routing as a suite says it; a file with its folder.

    Args:
        folder: that relative paths start at.

    Raises:
        InputError: says what there is.
    """
    if text == TRAINED:
        return text
    if text.endswith(SUFFIX):
        return str((folder or Path()) / Path(text).expanduser())
    if alpha_of(text) is not None:
        return text
    raise InputError(
        f"routing {text!r}: write zipf-1.5 (a popularity with that exponent, 0 to {MOST_ALPHA:g}), {TRAINED} (routers "
        f"that are trained for it), or the path of a file of moebench record-routing ({SUFFIX}; with {LAYER} in its "
        "name one a layer)"
    )


def alpha_of(text: str) -> float | None:
    """The exponent of a Zipf popularity; None where it is none."""
    try:
        alpha = float(text.removeprefix(ZIPF)) if text.startswith(ZIPF) else -1.0
    except ValueError:
        return None
    return alpha if 0 <= alpha <= MOST_ALPHA else None


def label_of(text: str) -> str:
    """What stands in the name of a case: of a file its name."""
    return Path(text).stem if text.endswith(SUFFIX) else text


def spec_of(text: str, layer: int, seed: int) -> RoutingSpec:
    """The routing of one layer: popularities of layers, and of seeds, are their own."""
    alpha = alpha_of(text)
    if alpha is not None:
        return RoutingSpec("zipf", seed=seed * 1000 + layer, alpha=alpha)
    return RoutingSpec("trace", path=text.replace(LAYER, str(layer)))
