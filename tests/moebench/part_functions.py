"""What ranks run in the tests of parts; apart, so that a rank does not import pytest."""

from moebench.checks import parts as check_parts
from moebench.kernels.collectives.group import Group
from moebench.systems.part_interface import PartCall, Setting
from moebench.systems.part_registry import make


def first_tensor(found):
    """Of whatever a part returns the first tensor of numbers that round: a tensor, several, or chunks of them."""
    while not hasattr(found, "add_"):
        pieces = [getattr(found, "h_NF", None)] if hasattr(found, "h_NF") else list(found)
        found = next(one for one in pieces if not hasattr(one, "add_") or one.is_floating_point())
    return found


def spoiled(setting: Setting) -> PartCall:
    """A part, one of whose results is off by its tenth on the last rank."""
    call = make(setting)

    def run():
        found = call.run()
        if setting.group.index == setting.group.size - 1:
            first_tensor(found).mul_(1.1)
        return found

    return PartCall(run, call.wrong, call.persistent)


def run_spoiled(group: Group, trials):
    """The check, of parts that are spoiled."""
    check_parts.make = spoiled
    return check_parts.run_rank(group, trials)
