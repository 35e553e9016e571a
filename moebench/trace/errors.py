"""Why a program can't be traced: one class a reason, so that a case can say which. Apart: every part raises them."""


class TraceError(RuntimeError):
    """The program can't be recorded; the text names the operator and what to do."""


class BannedOperator(TraceError):
    """An operator that runs as something else on another device, or that hides a wait or a host read."""


class UnknownOperator(TraceError):
    """An operator whose kind or cost nobody stated."""


class UnattributedOperator(TraceError):
    """An operator outside every region of the step."""


class Unsupported(Exception):
    """The system can't run this workload, with the reason; the case gets the status `unsupported`."""


class OutOfMemory(Exception):
    """A system that plans for a memory found no plan that fits, with the sizes; the status is `out-of-memory`."""


class Skipped(Exception):
    """It could run and isn't worth it here, with the reason; the case gets the status `skipped`."""
