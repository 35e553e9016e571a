"""What ranks run in the tests of exchanges; apart, so that a rank does not import pytest."""

from moebench.checks import exchanges as check_exchanges
from moebench.kernels.collectives.exchanges import plan_exchange


class _Wrong:
    """An exchange whose values come out of order, or whose gradient is twice what it should be."""

    def __init__(self, group, fault):
        self.plan, self.fault = plan_exchange("flat", group), fault

    def start(self, x):
        """As a plan does."""
        self.flight = self.plan.start(2 * x if self.fault == "gradient" else x)
        return self

    def wait(self):
        """The result, spoilt."""
        y = self.flight.wait()
        if self.fault == "gradient":
            return y - y.detach() / 2  # the right values, twice the gradient
        return y.flip(1)


def run_wrong(group, exchanges):
    """The check with exchanges that are wrong: `exchanges` names faults in place of exchanges."""
    check_exchanges.plan_exchange = lambda name, group: _Wrong(group, name)
    return check_exchanges.run_rank(group, exchanges)


def fail_on(group, exchanges):
    """One of the exchanges kills the ranks."""
    if any(name == "deadly" for name, _ in exchanges):
        raise RuntimeError("no such way")
    return check_exchanges.run_rank(group, exchanges)
