"""Transfers and who listens to them."""

from moebench.kernels.transfer import device_waits, host_waits, listening, mark, start_transfer


class Listener:
    """Writes down what it is told; its indices start at `first`."""

    def __init__(self, first=0):
        self.heard, self.first = [], first

    def transfer(self, kind, moved_bytes, after):
        return self._said(kind, moved_bytes, *after)

    def device_waits(self, index):
        self._said("device", index)

    def host_waits(self, indices):
        self._said("host", *indices)

    def mark(self):
        return self._said("mark")

    def _said(self, *what):
        self.heard.append(what)
        return self.first + len(self.heard) - 1


def test_each_listener_has_indices_of_its_own():
    """One that comes later hears nothing of what was before it."""
    one, two = Listener(), Listener(10)
    with listening(one):
        read = start_transfer("storage-read", 5)
        with listening(two):
            used = mark()
            copy = start_transfer("to-device", 3, (read, used))
            device_waits(copy)
            device_waits(read)
            host_waits(read, copy)
            host_waits(read)
    moves, waits = [("storage-read", 5), ("mark",), ("to-device", 3, 0, 1)], [("device", 2), ("device", 0)]
    assert one.heard == [*moves, *waits, ("host", 0, 2), ("host", 0)]
    assert two.heard == [("mark",), ("to-device", 3, 10), ("device", 11), ("host", 11)]


def test_what_outlives_its_listener_is_nothing_to_the_next():
    """A slot whose last use was in another recording is free from the start of this one."""
    before, after = Listener(), Listener()
    with listening(before):
        copy, free = start_transfer("to-device", 3), mark()
    with listening(after):
        start_transfer("to-device", 3, (free,))
        device_waits(copy)
        host_waits(copy, free)
    assert after.heard == [("to-device", 3)]
