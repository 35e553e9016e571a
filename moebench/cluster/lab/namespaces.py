"""The network of a lab: a namespace a node with one NIC (`eth0`), a bridge between them in the switch's namespace.

Nothing is looked up over the wire: addresses are known to all nodes, ports to the switch. So the bytes on a NIC are
those of the ranks, and no frame reaches a node that it is not for. IPv6 and multicast, which would chat, are off.
"""

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moebench.cluster.lab.tools import LabError, output_of

NIC = "eth0"
MTU = 1500
_NETWORK = ipaddress.ip_network("10.77.0.0/16")
_CONGESTION_CONTROL = "cubic"
MOST_NODES = 1000  # a bridge takes 1,023 ports


@dataclass(frozen=True)
class Network:
    """Where a lab's namespaces are found; travels to ranks by pickle and works there too.

    Attributes:
        holder: process id of the holder, whose own namespace is the switch.
        nodes: number of nodes, each with a namespace named by `node_name`.
    """

    holder: int
    nodes: int

    def namespace(self, node: int) -> str:
        """Path of a node's network namespace."""
        return f"/proc/{self.holder}/root/run/netns/{node_name(node)}"

    def user_namespace(self) -> str | None:
        """Path of the user namespace to enter first; None if it is this process's own.

        Raises:
            LabError: the lab is gone.
        """
        path = f"/proc/{self.holder}/ns/user"
        try:
            return None if os.path.samefile(path, "/proc/self/ns/user") else path
        except OSError as error:
            raise LabError(f"the lab's holder, process {self.holder}, is gone: {error}") from error

    def on_node(self, node: int, *command: str, text: str = "") -> str:
        """Output of a command run in a node's network namespace."""
        return output_of([*self._enter(), f"--net={self.namespace(node)}", *command], text)

    def on_switch(self, *command: str, text: str = "") -> str:
        """Output of a command run in the switch's namespaces, where the nodes' have names."""
        inside = [f"--net=/proc/{self.holder}/ns/net", f"--mount=/proc/{self.holder}/ns/mnt"]
        return output_of([*self._enter(), *inside, *command], text)

    def _enter(self) -> list[str]:
        user = self.user_namespace()
        return ["nsenter", *([f"--user={user}", "--preserve-credentials"] if user else [])]


def node_name(node: int) -> str:
    """The name of a node's namespace, within the holder."""
    return f"n{node}"


def port(node: int) -> str:
    """The switch's port to a node."""
    return f"p{node}"


def address(node: int) -> str:
    """The address of a node's NIC."""
    return str(_NETWORK.network_address + node + 1)


def wire(network: Network) -> None:
    """Create the nodes' namespaces, the switch and the links, and bring them up.

    Raises:
        LabError: the kernel refused.
    """
    nodes = range(network.nodes)
    network.on_switch("ip", "-batch", "-", text=_lines(f"netns add {node_name(node)}" for node in nodes))
    bridge = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
    lines = ["link set lo up", f"link add br0 {bridge}", *_silent("br0"), "link set br0 up"]
    for node in nodes:
        peer = f"peer name {NIC} mtu {MTU} address {_hardware_address(node)} netns {node_name(node)}"
        lines += [
            f"link add {port(node)} mtu {MTU} type veth {peer}",
            *_silent(port(node)),
            f"link set {port(node)} master br0 up",
        ]
    network.on_switch("ip", "-batch", "-", text=_lines(lines))
    entries = [f"fdb replace {_hardware_address(node)} dev {port(node)} master static" for node in nodes]
    network.on_switch("bridge", "-batch", "-", text=_lines(entries))
    for node in nodes:
        network.on_node(node, "ip", "-batch", "-", text=_lines(["link set lo up", *_silent(NIC)]))
        bring_up(network, node)


def bring_up(network: Network, node: int) -> None:
    """Bring a node's NIC up, with everything that its going down had taken away."""
    own = address(node)
    lines = [f"link set {NIC} up", f"addr replace {own}/{_NETWORK.prefixlen} dev {NIC}"]
    # A namespace can't choose its congestion control freely, a route can: no setting of the machine is touched.
    route = f"{_NETWORK} dev {NIC} proto kernel scope link src {own}"
    lines.append(f"route replace {route} congctl {_CONGESTION_CONTROL}")
    for other in range(network.nodes):
        if other != node:
            lines.append(f"neigh replace {address(other)} lladdr {_hardware_address(other)} dev {NIC} nud permanent")
    network.on_node(node, "ip", "-batch", "-", text=_lines(lines))


def take_down(network: Network, node: int) -> None:
    """Set a node's NIC down, as if its cable had been pulled."""
    network.on_node(node, "ip", "link", "set", NIC, "down")


def _hardware_address(node: int) -> str:
    return f"02:77:00:00:{node >> 8:02x}:{node & 255:02x}"


def _silent(device: str) -> list[str]:
    """Keep a device from taking an IPv6 address, and so from announcing it."""
    return [f"link set {device} addrgenmode none"] if Path("/proc/net/if_inet6").exists() else []


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
