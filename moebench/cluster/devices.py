"""Whether a GPU is the one that a hardware file describes, by its name: a measurement must not pass for another's."""

import re

from moebench.workloads.places import HARDWARE, package_folder


def is_named(device: str, hardware: str) -> bool:
    """Whether the driver's name of a GPU fits the name of a hardware file: every word of it, as a word.

    `NVIDIA A100-SXM4-80GB` is `a100-80`, and not `a100-40` or `a10`. A file of the user's may have any name and is
    taken at its word.
    """
    if not (package_folder(HARDWARE) / f"{hardware}.toml").is_file():
        return True
    name = device.lower()
    return all(re.search(rf"(?<![a-z0-9]){word}(?![0-9])", name) for word in hardware.split("-"))
