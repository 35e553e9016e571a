"""What a recorded program sends; apart, so that ranks and tests count alike."""


def sent_by(ops, rank, columns=None):
    """Bytes that a rank sends to others, in collectives of even or listed splits.

    Args:
        columns: counts those only whose elements come in rows of a multiple of it.
    """
    total = 0
    for op in ops:
        one = op.collective
        if one is None or (columns and (len(op.shapes[0]) < 2 or op.shapes[0][-1] % columns)):
            continue
        even = one.bytes_per_peer
        total += sum(one.send_bytes) - one.send_bytes[rank] if even is None else even * (len(one.ranks) - 1)
    return total
