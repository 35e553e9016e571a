"""A package of faulty systems, each with one fault, as text to be installed by a test."""

MODULE = '''
import os
import time
from moebench.systems.reference import Reference, ReferenceLayer


class Layer(ReferenceLayer):
    def forward(self, x_TD):
        y_TD, aux = super().forward(x_TD)
        return self.spoilt(y_TD), aux


class System(Reference):
    def build(self, workload, group, conventions, device, dtype):
        return self.layer(workload, group, conventions, device, dtype)


class Raises(System):
    name = "raises"
    class layer(Layer):
        def spoilt(self, y_TD):
            raise ZeroDivisionError("no luck")


class WrongShape(System):
    name = "wrong_shape"
    class layer(Layer):
        def spoilt(self, y_TD):
            return y_TD[:, :-1]


class WrongNumbers(System):
    name = "wrong_numbers"
    class layer(Layer):
        def spoilt(self, y_TD):
            return 1.5 * y_TD


class Spoils(System):
    """Right itself, and bad for whoever computes after it in the same process."""

    name = "spoils"
    class layer(Layer):
        def spoilt(self, y_TD):
            import moebench.systems.hetumoe
            moebench.systems.hetumoe.permute = None
            return y_TD


class Hangs(System):
    name = "hangs"
    class layer(Layer):
        def spoilt(self, y_TD):
            time.sleep(1000)


class HangsInTrace(System):
    name = "hangs_in_trace"
    class layer(Layer):
        def spoilt(self, y_TD):
            while y_TD.is_meta:
                pass
            return y_TD


class ExitsInTrace(System):
    name = "exits_in_trace"
    class layer(Layer):
        def spoilt(self, y_TD):
            if y_TD.is_meta:
                os._exit(3)
            return y_TD


class NoReason(System):
    name = "no_reason"

    def supports(self, workload, conventions):
        return False
'''
SYSTEMS = {
    "raises": "faulty:Raises",
    "wrong_shape": "faulty:WrongShape",
    "wrong_numbers": "faulty:WrongNumbers",
    "spoils": "faulty:Spoils",
    "hangs": "faulty:Hangs",
    "hangs_in_trace": "faulty:HangsInTrace",
    "exits_in_trace": "faulty:ExitsInTrace",
    "no_reason": "faulty:NoReason",
    "raises_at_import": "faulty_import:System",
    "exits_at_import": "faulty_exit:System",
    "hangs_at_import": "faulty_sleep:System",
}
# What each that comes to an end has for its rows, and words of the reason; those that are right have numbers.
FOUND = {
    "raises": ("failed", "ZeroDivisionError: no luck (faulty.py, line "),
    "wrong_shape": ("failed", "Mismatch in shape"),
    "wrong_numbers": ("wrong", "output of rank 0 in step 1: relative error"),
    "spoils": ("passed", ""),
    "exits_in_trace": ("failed", "it ended the process it ran in"),
    "no_reason": ("failed", "supports of no_reason gives False"),
    "raises_at_import": ("failed", "can't be loaded: RuntimeError: not today"),
    "exits_at_import": ("failed", "exited with status 7"),
}
FILES = {
    "faulty.py": MODULE,
    "faulty_import.py": "raise RuntimeError('not today')\n",
    "faulty_exit.py": "import os\nos._exit(7)\n",
    "faulty_sleep.py": "import time\ntime.sleep(1000)\n",
}
