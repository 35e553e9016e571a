"""Where the supervisors of launched ranks leave each other objects: a key-value store at the address they all know."""

import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from moebench.cluster.detect import Launched
from moebench.workloads.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import Store

_MEET_TIMEOUT = timedelta(minutes=10)


class Board:
    """Objects by key. Every method raises RuntimeError where the store is gone, and with it who held it."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def put(self, key: str, value: Any) -> None:
        """Leave an object for whoever looks."""
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes travel, whatever the stub says

    def has(self, *keys: str) -> bool:
        """Whether all of them have been left."""
        return self._store.check(list(keys))

    def read(self, key: str) -> Any:
        """An object that is there."""
        return pickle.loads(self._store.get(key))

    def remove(self, key: str) -> None:
        """Take an object away."""
        self._store.delete_key(key)


def shared_board(place: Launched) -> Board:
    """The board of all ranks that were launched with this one; rank 0 holds it unless the launcher does.

    Raises:
        InputError: it can't be reached.
    """
    import torch.distributed as dist

    try:
        store = dist.TCPStore(
            place.address,
            place.port,
            place.world,
            is_master=place.rank == 0 and not place.has_store,
            timeout=_MEET_TIMEOUT,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise InputError(f"no meeting of the ranks at {place.address}:{place.port}: {error}") from error
    return Board(dist.PrefixStore(place.prefix, store))
