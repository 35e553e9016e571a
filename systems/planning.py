"""What a harness needs of systems that plan by what things cost: graphs, the executor, prices.

One place to import from, so that who prices programs knows no system by name.
"""

from moebench.systems.lancet.capture import StepGraph
from moebench.systems.lancet.costs import LinearPieces
from moebench.systems.lancet.executor import Executor, Span
from moebench.systems.lancet.instructions import Program as Instructions
from moebench.systems.lancet.nodes import collective_of, value_of
from moebench.systems.lancet.optimise import DoesNotFit, Optimised, Prices
from moebench.systems.lancet.partition import PartTimes, even_part_s
from moebench.systems.lancet.plan import plan_of
from moebench.systems.lancet.profile import MeasuredProfile
from moebench.systems.lancet.schedule import Times
from moebench.systems.lancet.system import sample_data
from moebench.systems.lancet.timeline import Timeline

__all__ = [
    "DoesNotFit",
    "Executor",
    "Instructions",
    "LinearPieces",
    "MeasuredProfile",
    "Optimised",
    "PartTimes",
    "Prices",
    "Span",
    "StepGraph",
    "Timeline",
    "Times",
    "collective_of",
    "even_part_s",
    "plan_of",
    "sample_data",
    "value_of",
]
