"""What a rank leaves in files for whoever started it: a result, or when and how it raised, each whole or not
there; and how it goes.
"""

import contextlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any, NoReturn

NO_ROOM = 74  # exit status of a rank whose traceback found no room either (EX_IOERR of sysexits.h)


def leave(path: Path, content: Any) -> None:
    """Write `content`; what did not fit is removed, so that there is room to say so.

    Raises:
        OSError: it can't be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(pickle.dumps(content))
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def leave_failure(path: Path, when_s: float, text: str) -> int:
    """Write when a rank raised and its traceback; the status to exit with."""
    try:
        leave(path, (when_s, text))
    except OSError:
        return NO_ROOM
    return 1


def exit_after_peers() -> NoReturn:
    """Exit when all ranks have come so far: no socket closes under a peer that still reads."""
    with contextlib.suppress(Exception):  # a peer that fails from here on tells its own story
        import torch.distributed as dist

        dist.barrier()
    exit_at_once(0)


def exit_at_once(status: int) -> NoReturn:
    """Exit without tearing down the group: with a peer gone, that could wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
