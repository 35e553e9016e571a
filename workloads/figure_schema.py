"""What a suite file may say of a paper's figures, as a strict model; moebench.workloads.load_figures reads the rest."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from moebench.workloads.figure import AGAINST, AXES, COLUMN, MARKS, QUANTITIES, VALUES, WIDTHS
from moebench.workloads.schema import Name, Strict, Text, choice, fault

Key = Annotated[str, Field(min_length=1)]


class PaperFigureFile(Strict):
    """A figure or table of the paper: what it shows, or why nothing can be drawn."""

    name: Name
    title: Text
    number: Text | None = None
    published: Text | None = None
    not_drawn: Text | None = None
    experiment: Name | None = None
    value: Annotated[str, choice("value", VALUES)] | None = None
    metric: Annotated[str, choice("metric", tuple(QUANTITIES))] | None = None
    baseline: Text | None = None
    x: Key | None = None
    series: Key | None = None
    panel: Key | None = None
    only: dict[str, Annotated[list[str | int], Field(min_length=1)]] = Field(default_factory=dict)
    reported: list[Text] = Field(default_factory=list)
    mark: Annotated[str, choice("mark", MARKS)] | None = None
    width: Annotated[str, choice("width", WIDTHS)] = COLUMN

    @model_validator(mode="after")
    def _is_drawn_or_says_why(self) -> Self:
        needed = ("experiment", "value", "x")
        drawn = (*needed, "metric", "baseline", *AXES[1:], "only", "reported", "mark")
        said = [key for key in drawn if getattr(self, key)]
        missing = [key for key in needed if not getattr(self, key)]
        if self.not_drawn and said:
            raise fault(f"not_drawn says why there is nothing to draw, and {said[0]} what is drawn; keep one of them")
        if not self.not_drawn and missing:
            raise fault(f"missing key {missing[0]}, or not_drawn with the reason why nothing is drawn")
        if (self.value in AGAINST) != (self.baseline is not None):
            raise fault(f"value = {' or '.join(map(repr, AGAINST))} needs a baseline, and no other has one")
        return self
