"""Whether this machine can emulate a cluster: tried for real, and what to do where it can't."""

import sys
from collections.abc import Callable

from moebench.cluster.lab import holder, namespaces
from moebench.cluster.lab.namespaces import Network
from moebench.cluster.lab.shaping import shape
from moebench.cluster.lab.tools import PACKAGES, LabError, missing_tools

_OTHERWISE = "or run plain ranks without a network between them (--unshaped)"
_RIGHTS = (
    "run as root; in a container, allow it (docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt "
    "apparmor=unconfined); as an ordinary user, have user namespaces allowed (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
)
_LINKS = "load the kernel modules veth, bridge and tcp_cubic (modprobe)"
_SHAPERS = "load the kernel modules sch_htb and sch_tbf (modprobe)"
_SLOW, _FAST = 1e6, 1e9  # bit/s: one for each kind of shaper
_BUFFER_BYTES = 512 << 10


def lab_problem() -> str | None:
    """None if a Lab can be built here, else what is missing and what to do; builds a small one to find out."""
    if sys.platform != "linux":
        return f"an emulated cluster needs Linux network namespaces, this is {sys.platform}: use Linux, {_OTHERWISE}"
    if missing := missing_tools():
        packages = " and ".join(sorted({PACKAGES[name] for name in missing}))
        return f"an emulated cluster needs the commands {', '.join(missing)}: install {packages}, {_OTHERWISE}"
    try:
        process = holder.start_holder()
    except LabError as error:
        return f"this process may not create network namespaces ({error}): {_RIGHTS}; {_OTHERWISE}"
    try:
        return _try_to_build(Network(process.pid, nodes=2))
    finally:
        holder.end_holder(process)


def _try_to_build(network: Network) -> str | None:
    steps: tuple[tuple[str, str, Callable[[], None]], ...] = (
        ("link namespaces", _LINKS, lambda: namespaces.wire(network)),
        ("hold a slow NIC to its rate", _SHAPERS, lambda: shape(network, _SLOW, _BUFFER_BYTES)),
        ("hold a fast NIC to its rate", _SHAPERS, lambda: shape(network, _FAST, _BUFFER_BYTES)),
    )
    for what, advice, step in steps:
        try:
            step()
        except LabError as error:
            return f"this kernel does not {what} ({error}): {advice}, {_OTHERWISE}"
    return None
