"""What run.json must hold: one strict model of it, checked whenever a run is opened.

Apart from the store, which reads and writes the file: here is only what makes one valid.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from moebench.cases.plan import ENGINES, Filters
from moebench.results.plain import from_plain
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.machine import Hardware
from moebench.workloads.suite import Suite


@dataclass(frozen=True)
class Environment:
    """What a run ran on, as `moebench.environment.environment` says it; a later version may say more."""

    moebench: str
    command: str
    seed: int | None
    python: str
    packages: Mapping[str, str | None]
    git: Mapping[str, object] | None
    system: str
    machine: str
    cpu: str | None
    cores: int
    memory_bytes: int | None
    gpus: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Record:
    """The keys of run.json."""

    schema_version: int
    created: str
    finished: str | None
    cases: int
    engine: str
    suite: Suite
    filters: Filters
    environment: Mapping[str, object]
    resumed: tuple[Mapping[str, object], ...]
    hardware: Mapping[str, Hardware]
    topologies: Mapping[str, object]


def check_record(data: Any, where: str) -> None:
    """Refuse what is no run.json.

    Raises:
        InputError: a key is missing, unknown or of the wrong type, or its value has no meaning; names file and key.
    """
    from moebench.workloads.load_suite import check_suite

    try:
        record = from_plain(Record, data)
        for environment in (record.environment, *record.resumed):
            known = {f.name for f in fields(Environment)}
            from_plain(Environment, {key: value for key, value in environment.items() if key in known})
        for time in (record.created, record.finished):
            if time is not None:
                datetime.fromisoformat(time)
    except ValueError as error:
        raise InputError(f"{where}: {_without_class(str(error))}") from None
    if record.cases < 0:
        raise InputError(f"{where}: cases: {record.cases} is negative")
    if record.engine not in ENGINES:
        raise one_of("engine", record.engine, ENGINES, where)
    check_suite(record.suite, f"{where}: suite")


def _without_class(text: str) -> str:
    """`Record.suite.seed: ...` as a reader of the file knows it: `suite.seed: ...`."""
    return re.sub(r"^Record(\.|: )", "", text).replace("Environment", "environment", 1)
