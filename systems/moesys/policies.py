"""Which expert states stay in host memory: MoESys' own rule, plain LFU and plain LRU.

A policy decides and counts; it moves no byte. A request names a state that is needed; the policy says whether it is
there, and which other state must leave to make room.
"""

from collections.abc import Callable, Container, Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

Key = Hashable

VICTIMS = ("least-if-above", "least-above-threshold")
FALLBACKS = ("bypass", "least")


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request came to.

    Attributes:
        is_hit: the state was in the cache.
        is_cached: it is there now; False where it has to bypass the cache.
        evicted: the state that leaves for it, None where there was room.
    """

    is_hit: bool
    is_cached: bool = True
    evicted: Key | None = None


class Policy(Protocol):
    """A rule for a cache of `capacity` states, which may be none."""

    capacity: int

    def request(self, key: Key, in_use: Container[Key] = ()) -> Decision:
        """A state is needed; those `in_use` stay."""

    def has_place(self, in_use: Container[Key] = ()) -> bool:
        """Whether a state that is not there would get a place now; nothing is counted."""

    def forget(self, key: Key) -> None:
        """The state is no longer in the cache, for another reason than a request."""

    def __contains__(self, key: object) -> bool: ...

    def __iter__(self) -> Iterator[Key]: ...


class _Counted:
    """Cached states with their hits, least recently requested first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"a cache of {capacity} states: it may hold none, not fewer")
        self.capacity = capacity
        self.hits: dict[Key, float] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.hits

    def __iter__(self) -> Iterator[Key]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)

    def request(self, key: Key, in_use: Container[Key] = ()) -> Decision:
        """A state is needed; those `in_use` stay."""
        if key in self.hits:
            self.hits[key] = self.hits.pop(key) + 1  # to the end: most recently requested
            return Decision(is_hit=True)
        evicted = None
        if len(self.hits) >= self.capacity:
            evicted = self.victim(in_use)
            if evicted is None:
                return Decision(is_hit=False, is_cached=False)
            del self.hits[evicted]
        self.hits[key] = 1
        return Decision(is_hit=False, evicted=evicted)

    def has_place(self, in_use: Container[Key] = ()) -> bool:
        """Whether a state that is not there would get a place now; nothing is counted."""
        return len(self.hits) < self.capacity or self.victim(in_use) is not None

    def forget(self, key: Key) -> None:
        """The state is no longer in the cache."""
        self.hits.pop(key, None)

    def victim(self, in_use: Container[Key]) -> Key | None:
        """The state that leaves a full cache; None: none may."""
        raise NotImplementedError

    def least(self, in_use: Container[Key], above: float = 0.0) -> Key | None:
        """Of the states with `above` hits or more that are not in use, the one with fewest, then the oldest request."""
        candidates = [key for key, hits in self.hits.items() if hits >= above and key not in in_use]
        return min(candidates, key=self.hits.__getitem__, default=None)


class LRU(_Counted):
    """The least recently requested state leaves."""

    def victim(self, in_use: Container[Key]) -> Key | None:
        """The oldest request."""
        return next((key for key in self.hits if key not in in_use), None)


class LFU(_Counted):
    """The state that was requested least while it was cached leaves; of several the least recently requested."""

    def victim(self, in_use: Container[Key]) -> Key | None:
        """The fewest hits."""
        return self.least(in_use)


class MoESysPolicy(_Counted):
    """Algorithm 2 of the paper: LFU with a threshold below which a state may not be evicted, and hits that decay.

    It leaves open what becomes of a miss that may evict nobody, and some values. What is settled here:

    - all C slots are used (printed: one fewer, by a strict comparison);
    - a newcomer has one hit, also after an eviction (printed: undefined);
    - of equal hits the least recently requested leaves (undefined);
    - decay replaces each hit count by `decay` times itself after every `period` requests (printed without assignment);
    - `victim`: the printed condition, hits at or above the threshold and equal to the minimum, is read as the minimum
      of all if it is not below the threshold (`least-if-above`, as printed) or as the minimum of those that are not
      below it (`least-above-threshold`, which protects newcomers until they have had their chance);
    - `fallback`, where no state may leave so (printed: nothing happens): the state goes to the device without entering
      the cache (`bypass`), or the least of all leaves (`least`).

    Args:
        capacity: C, states; with none every request goes past the cache.
        threshold: hits; 0 or 1 protects nobody until hits have decayed below it.
        decay: beta, 0 to 1; 1 is none.
        period: K, requests from one decay to the next.

    Raises:
        ValueError: a value outside of what is named above.
    """

    def __init__(
        self,
        capacity: int,
        threshold: float = 2.0,
        decay: float = 0.5,
        period: int = 256,
        victim: str = "least-if-above",
        fallback: str = "bypass",
    ) -> None:
        super().__init__(capacity)
        _check_one_of("victim", victim, VICTIMS)
        _check_one_of("fallback", fallback, FALLBACKS)
        if not 0 <= decay <= 1:
            raise ValueError(f"decay = {decay}: between 0 and 1")
        if not threshold >= 0:
            raise ValueError(f"threshold = {threshold}: hits are never negative")
        if period < 1:
            raise ValueError(f"period = {period}: at least 1 request")
        self.threshold, self.decay, self.period = threshold, decay, period
        self.victim_rule, self.fallback = victim, fallback
        self._requests = 0

    def request(self, key: Key, in_use: Container[Key] = ()) -> Decision:
        """A state is needed; those `in_use` stay."""
        decision = super().request(key, in_use)
        self._requests += 1
        if self._requests == self.period:
            self._requests = 0
            self.hits = {cached: hits * self.decay for cached, hits in self.hits.items()}
        return decision

    def victim(self, in_use: Container[Key]) -> Key | None:
        """By the threshold, else by the fallback."""
        if self.victim_rule == "least-above-threshold":
            found = self.least(in_use, self.threshold)
        else:
            found = self.least(in_use)
            if found is not None and self.hits[found] < self.threshold:
                found = None
        if found is None and self.fallback == "least":
            found = self.least(in_use)
        return found


POLICIES: dict[str, Callable[..., Policy]] = {"moesys": MoESysPolicy, "lfu": LFU, "lru": LRU}


def make_policy(name: str, capacity: int, **options: float | str) -> Policy:
    """A policy by name; only `moesys` has options.

    Raises:
        ValueError: unknown name, option or value.
    """
    _check_one_of("policy", name, tuple(POLICIES))
    if options and name != "moesys":
        raise ValueError(f"policy {name} has no options; got {', '.join(options)}")
    known = ("threshold", "decay", "period", "victim", "fallback")
    for option in options:
        _check_one_of("option of policy moesys", option, known)
    return POLICIES[name](capacity, **options)


def _check_one_of(what: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(valid)}")
