"""The process that holds a lab's namespaces, and what a dead owner may leave of it.

The holder is a shell in a network namespace (the switch) and a mount namespace of its own: the names of the nodes'
namespaces and their mounts exist in there only, and the machine has nothing but a process more. The shell ends when its
standard input closes, so when its owner closes it or dies, however it dies, and the kernel then takes everything down.

A holder that could not do that (it was stopped, or a fork of the owner keeps its input open) is stale once its owner is
dead. Its last argument says whose it is: our prefix, the owner's process id, and when the owner was started.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
from pathlib import Path

from moebench.cluster.lab.tools import LabError, environment

PREFIX = "moebench-lab"
_MARK = re.compile(rf"{PREFIX}-(\d+)-(\d+)")
_HOLD = "mount -t tmpfs moebench /run && mkdir /run/netns && echo ready && read -r _"
_DIRECT = ("unshare", "--net", "--mount")
_AS_ROOT_OF_A_USER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net", "--mount")
FORMS = (_DIRECT, _AS_ROOT_OF_A_USER_NAMESPACE)
_READY_TIMEOUT_S = 20.0
_END_TIMEOUT_S = 5.0


def start_holder() -> subprocess.Popen[bytes]:
    """Start a holder in the first of the forms that this process may use.

    Raises:
        LabError: what was said to each of them.
    """
    refusals = []
    for form in FORMS:
        command = [*form, "sh", "-c", _HOLD, f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"]
        # A session of its own: Ctrl-C at the terminal is for the owner, which then closes in order.
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
            start_new_session=True,
        )  # fmt: skip
        try:
            refusal = _refusal(holder)
        except BaseException:
            end_holder(holder)
            raise
        if refusal is None:
            return holder
        refusals.append(f"`{' '.join(form)}`: {refusal}")
    raise LabError("; ".join(refusals))


def _refusal(holder: subprocess.Popen[bytes]) -> str | None:
    """None once the holder is ready, else why it is not."""
    assert holder.stdout is not None
    assert holder.stderr is not None
    with holder.stdout, holder.stderr:
        said = select.select([holder.stdout], [], [], _READY_TIMEOUT_S)[0] and holder.stdout.readline()
        if said == b"ready\n":
            return None
        end_holder(holder)
        text = holder.stderr.read().decode(errors="replace").strip()
    return text or f"ended with status {holder.returncode}"


def end_holder(holder: subprocess.Popen[bytes]) -> None:
    """End a holder and wait for it."""
    assert holder.stdin is not None
    holder.stdin.close()
    try:
        holder.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()


def find_stale() -> list[int]:
    """Process ids of holders whose owner is dead."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _is_stale(int(entry.name))]


def remove_stale() -> list[int]:
    """Kill the holders whose owner is dead, and with each its namespaces; returns their process ids."""
    removed = []
    for process in find_stale():
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(process)
            try:
                if _is_stale(process):  # again, now that the handle keeps the id from being used anew
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    select.select([handle], [], [], _END_TIMEOUT_S)
                    removed.append(process)
            finally:
                os.close(handle)
    return removed


def _is_stale(process: int) -> bool:
    mark = _mark(process)
    return mark is not None and _sees_our_processes(process) and _start_time(mark[0]) != mark[1]


def _mark(process: int) -> tuple[int, int] | None:
    """The owner's process id and start time, if this process is a holder (and has not ended)."""
    try:
        arguments = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return None
    found = _MARK.fullmatch(arguments[3]) if len(arguments) == 4 and arguments[:2] == ["sh", "-c"] else None
    return (int(found[1]), int(found[2])) if found else None


def _sees_our_processes(process: int) -> bool:
    """Whether its process ids mean what ours do; in a container a living owner has another number than here."""
    try:
        return os.readlink(f"/proc/{process}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _start_time(process: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if there is none or it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
