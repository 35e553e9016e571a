"""The rate of a NIC: what a node sends is held back at its `eth0`, what it receives at the switch's port to it.

The port's queue is the switch's buffer, and the only place where packets are lost: the sender's own queue is deep, and
TCP keeps it short.
"""

from moebench.cluster.lab.limits import LEAST_BUFFER_BYTES
from moebench.cluster.lab.namespaces import NIC, Network, port

_SENDER_QUEUE_BYTES = 8 << 20
_FRAME_BYTES = 64 << 10  # the most that the kernel hands to a NIC at once (segmentation offload)
_WHOLE_FRAMES_FROM = 100e6  # bit/s; there such a frame takes 5 ms
_BURST_S = 2e-4
_MOST_BURST_BYTES = 128 << 10


def shape(network: Network, rate_bits_per_s: float, switch_buffer_bytes: int) -> None:
    """Hold every NIC to a rate, both ways.

    Raises:
        LabError: the kernel refused.
    """
    for node in range(network.nodes):
        network.on_node(node, "tc", "-batch", "-", text=_discipline(NIC, rate_bits_per_s, _SENDER_QUEUE_BYTES))
    ports = (_discipline(port(node), rate_bits_per_s, switch_buffer_bytes) for node in range(network.nodes))
    network.on_switch("tc", "-batch", "-", text="".join(ports))


def _discipline(device: str, rate_bits_per_s: float, queue_bytes: int) -> str:
    """Lines for `tc`.

    TBF cuts offloaded frames into packets, HTB passes them whole, which costs less CPU; on a slow link or into a
    shallow buffer a whole one is too much at once.
    """
    rate = f"{rate_bits_per_s:.0f}bit"
    burst = int(min(_MOST_BURST_BYTES, max(LEAST_BUFFER_BYTES, rate_bits_per_s / 8 * _BURST_S)))
    if rate_bits_per_s < _WHOLE_FRAMES_FROM or queue_bytes < 4 * _FRAME_BYTES:
        return f"qdisc replace dev {device} root handle 2: tbf rate {rate} burst {burst} limit {queue_bytes}\n"
    return (
        f"qdisc replace dev {device} root handle 1: htb default 10\n"
        f"class add dev {device} parent 1: classid 1:10 htb rate {rate} burst {burst} cburst {burst} quantum 60000\n"
        f"qdisc add dev {device} parent 1:10 handle 10: bfifo limit {queue_bytes}\n"
    )
