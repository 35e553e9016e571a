"""The outside commands that a lab is built with, and the one error for everything that they may refuse."""

import os
import shutil
import subprocess
from collections.abc import Sequence

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")  # not on an ordinary user's path
_TIMEOUT_S = 30.0


class LabError(RuntimeError):
    """A lab could not be built or asked; the text has the command and what it said."""


def environment() -> dict[str, str]:
    """This process's environment, with the system's folders on the path and messages in English."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM_FOLDERS)).lstrip(os.pathsep)
    return dict(os.environ) | {"PATH": path, "LC_ALL": "C"}


def missing_tools() -> list[str]:
    """Commands that are not installed."""
    path = environment()["PATH"]
    return [name for name in PACKAGES if shutil.which(name, path=path) is None]


def output_of(command: Sequence[str], text: str = "") -> str:
    """Standard output of a command that reads `text`.

    Raises:
        LabError: it failed, could not be started, or hung.
    """
    try:
        done = subprocess.run(
            command, input=text, text=True, capture_output=True, env=environment(), timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
