"""What this machine is, by the operating system's word: processor, memory, caches."""

import os
import platform
import re
from pathlib import Path

from moebench.local.child import usable_cores


def cpu_title() -> str:
    """The processor's model, `AMD EPYC`."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def cpu_family() -> str:
    """Family and model numbers where the kernel tells, as virtual machines often hide the name."""
    found = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("cpu family", "model") and key.strip() not in found:
                found[key.strip()] = value.strip()
    except OSError:
        return ""
    return f"family {found['cpu family']} model {found['model']}" if len(found) == 2 else ""


def machine_title(threads: int | None = None) -> str:
    """The processor and the threads that compute on it, by default one for each usable core."""
    return f"{cpu_title()} {cpu_family()}".strip() + f", {threads or len(usable_cores())} threads"


def cpu_slug() -> str:
    """`machine_title` as a file name, `amd-epyc-family-25-model-17-2-threads`."""
    text = machine_title()
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def last_cache_bytes() -> int | None:
    """Size of the largest cache of the first usable core, or None where the kernel doesn't tell."""
    sizes = []
    for path in Path(f"/sys/devices/system/cpu/cpu{usable_cores()[0]}/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]])
    return max(sizes, default=None)
