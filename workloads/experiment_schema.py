"""What experiments of every kind say in a suite file, as strict models; apart, so that each kind may have its file."""

import re
from typing import Annotated

from pydantic import Field

from moebench.workloads.schema import Name, Strict, Text, pattern

SystemName = Annotated[
    str,
    pattern(
        "a system: write a name, and options such as tutel+degree=4",
        re.compile(r"[a-z0-9][a-z0-9_.-]*(\+[a-z0-9_]+=[a-z0-9_.-]+)*"),
    ),
]
GateLabel = Annotated[
    str,
    pattern(
        "a gate: write a name, a name and its k such as topk-4, and options such as sam-2+groups=4",
        re.compile(r"[a-z][a-z0-9_-]*(\+[a-z_]+=[A-Za-z0-9._-]+)*"),
    ),
]


class Described(Strict):
    """What an experiment of any kind says of itself."""

    name: Name
    title: Text
    question: Text
    not_published: list[Text] = Field(default_factory=list)
    caveats: list[Text] = Field(default_factory=list)
