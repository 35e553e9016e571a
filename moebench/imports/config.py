"""A config.json that notes which of its keys were read, and complains with file and key."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moebench.workloads.errors import InputError

# Keys that say whose file it is, and nothing about a model.
ABOUT = ("architectures", "auto_map", "transformers_version", "_name_or_path", "model_type")


class Config:
    """What a file says; `read` are the keys that were asked for."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path, self.data = path, data
        self.read = set(ABOUT)

    @classmethod
    def of(cls, path: Path) -> "Config":
        """Read a file.

        Raises:
            InputError: it can't be read, or is no JSON object.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not a JSON document: {error}") from None
        if not isinstance(data, dict):
            raise InputError(f"{path}: not a JSON object; the config.json of a model is one")
        return cls(path, data)

    def get(self, key: str) -> Any:
        """A value, None where there is none."""
        self.read.add(key)
        return self.data.get(key)

    def integer(self, key: str, least: int = 1) -> int:
        """A whole number.

        Raises:
            InputError: it is none, or too small.
        """
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{self.path}: {key}: {value!r} is no whole number of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number.

        Raises:
            InputError: it is none.
        """
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise InputError(f"{self.path}: {key}: {value!r} is no positive number")
        return float(value)

    def has(self, *keys: str) -> bool:
        """Whether it says something of all these keys."""
        return all(self.data.get(key) is not None for key in keys)

    def require(self, keys: Sequence[str], family: str) -> None:
        """Refuse a file that lacks any of these keys.

        Raises:
            InputError: all that are missing.
        """
        missing = [key for key in keys if not self.has(key)]
        if missing:
            raise InputError(f"{self.path}: missing key {', '.join(missing)}; a {family} has {', '.join(keys)}")
