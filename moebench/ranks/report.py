"""Why a run of ranks failed, in words: the first cause first, each rank by number with its own traceback."""

import pickle
import re
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from moebench.ranks.pulse import Listener
from moebench.ranks.remains import NO_ROOM

_NOTICE_S = 0.05  # a death is noticed after it happened; until then peers may have written of the lost connection
_LOG_CHARACTERS = 4000
# What gloo, NCCL and the store say on ranks that lost another one.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|caused by a remote worker|ncclRemoteError|remote process exit",
    re.IGNORECASE,
)


@dataclass
class Outcome:
    """How each rank ended.

    Attributes:
        exits: rank -> (exit status, negative for a signal; time.monotonic() when noticed).
        killed: the ranks that run_ranks killed.
        timed_out: whether it did so because the time was up, not because another rank had failed.
        silent_s, at: how long rank 0 had been silent when time was up, None where it was not for that; and what it had
            said last that it was at.
        diagnosis: what the caller found out about it while the ranks were there.
    """

    exits: dict[int, tuple[int, float]] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    timed_out: bool = False
    silent_s: float | None = None
    at: str = ""
    diagnosis: list[str] = field(default_factory=list)

    @property
    def is_failure(self) -> bool:
        """Whether any rank did not end well."""
        return bool(self.killed) or any(status for status, _ in self.exits.values())

    def hear_nothing(self, listener: Listener) -> None:
        """Note that rank 0 has been silent for too long."""
        self.silent_s, self.at = listener.longest_s, listener.at

    def lateness(self, timeout_s: float) -> str:
        """What the ranks that were not done were late by."""
        if self.silent_s is None:
            return f"not done after {timeout_s:g} s"
        return f"stuck{' in ' * bool(self.at)}{self.at}: no sign of life for {self.silent_s:.3g} s, see --timeout"


def explain(folder: Path, target: str, world: int, outcome: Outcome, timeout_s: float) -> str:
    """The text of the error, from what the ranks left in `folder`."""
    exits = {rank: end for rank, end in outcome.exits.items() if rank not in outcome.killed}
    ended = sorted(_failure(folder, rank, *end) for rank, end in exits.items() if end[0])
    # A death may be noticed long after its peers have raised: that they lost it is never the first cause.
    failures = [text for _, text in sorted(ended, key=lambda found: bool(_LOST_PEER.search(found[1])))]
    # After the first come, mostly, lost connections to the rank that failed: a line each is enough.
    parts = failures[:1] + [_in_one_line(text) for text in failures[1:]]
    if outcome.timed_out:
        parts += _late(folder, world, outcome.killed, outcome.lateness(timeout_s))
    elif outcome.killed:
        parts.append(f"{_were(outcome.killed)} then killed")
    return f"{target} on {world} ranks failed\n\n" + "\n\n".join(outcome.diagnosis + parts)


def _failure(folder: Path, rank: int, status: int, noticed: float) -> tuple[float, str]:
    """When a rank failed, and its traceback or, for one that died without one, the end of its output."""
    record = folder / f"{rank}.failure"
    if record.exists():
        raised, text = pickle.loads(record.read_bytes())
        return raised, f"rank {rank} raised:\n{text.rstrip()}"
    if status == NO_ROOM:
        where = tempfile.gettempdir()
        return noticed - _NOTICE_S, f"rank {rank} raised, and found no room to say what among temporary files ({where})"
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    output = _text(folder / f"{rank}.log")[-_LOG_CHARACTERS:]
    last = f"; its last output:\n{output}" if output else ""
    return noticed - _NOTICE_S, f"rank {rank} {how}, without a traceback{last}"


def _in_one_line(failure: str) -> str:
    lines = failure.splitlines()
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 else failure


def _late(folder: Path, world: int, killed: set[int], lateness: str) -> list[str]:
    """Which ranks were not done in time, and where each stood."""
    late = {rank for rank in killed if not (folder / f"{rank}.result").exists()}
    done = set(range(world)) - late
    stopped = {rank for rank in late if (folder / f"{rank}.stopped").exists()}
    parts = [f"{_were(stopped)} stopped by a signal, and did not answer"] if stopped else []
    parts += [f"{_were(late)} {lateness}" + (f" ({_were(done)} done)" if done else "")]
    return parts + [
        f"rank {rank} stood at:\n{_text(folder / f'{rank}.stack') or '(it wrote no stack)'}" for rank in sorted(late)
    ]


def _were(ranks: set[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} {'were' if len(ranks) > 1 else 'was'}"


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""
