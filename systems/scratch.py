"""Where files lie that a system keeps on disk while it runs: `moebench run --scratch`, else the system's own folder."""

import os
import tempfile
from pathlib import Path

VARIABLE = "MOEBENCH_SCRATCH"  # of the environment, so that every process of a run knows


def scratch() -> Path:
    """The folder; whoever puts files there makes one of its own in it, and removes it."""
    return Path(os.environ.get(VARIABLE) or tempfile.gettempdir())
