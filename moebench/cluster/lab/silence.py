"""Who did not answer: gloo's own errors name an address or nobody, a lab knows links, connections and ranks."""

import ipaddress
import json
import re
import sys
from collections.abc import Iterator, Sequence

from moebench.cluster.lab.namespaces import NIC, Network, address, port

_UNANSWERED_TIMEOUTS = 2  # retransmission timeouts in a row; one happens on a full link


def silent_nodes(network: Network, ranks_per_node: int) -> list[str]:
    """A sentence for every node that has been cut off, or that others have asked in vain."""
    cut, pairs = cut_nodes(network), sorted(unanswered(network))
    lines = [f"{_ranks(node, ranks_per_node)} did not answer: {how}" for node, how in cut.items()]
    for node in range(network.nodes):
        askers = [asker for asker, other in pairs if other == node and not cut.keys() & {asker, node}]
        if askers:
            nodes = f"node{'s' * (len(askers) > 1)} {', '.join(map(str, askers))}"
            asked = _ranks(node, ranks_per_node)
            lines.append(f"{asked} did not answer {nodes}: data were sent again and again in vain")
    return lines


def cut_nodes(network: Network) -> dict[int, str]:
    """Nodes whose link is down -> at which end."""
    ports = {link["ifname"] for link in json.loads(network.on_switch("ip", "-j", "link", "show")) if _is_up(link)}
    cut = {}
    for node in range(network.nodes):
        [nic] = json.loads(network.on_node(node, "ip", "-j", "link", "show", "dev", NIC))
        if not _is_up(nic):
            cut[node] = f"its NIC ({NIC}) is down"
        elif port(node) not in ports:
            cut[node] = f"the switch's port to it ({port(node)}) is down"
    return cut


def _is_up(link: dict) -> bool:
    return "UP" in link["flags"]


def unanswered(network: Network) -> set[tuple[int, int]]:
    """Pairs of nodes (asker, asked) with a connection on which data are sent again without any answer."""
    nodes = {address(node): node for node in range(network.nodes)}
    return {
        (asker, nodes[peer])
        for asker in range(network.nodes)
        for peer in _peers_without_answer(network.on_node(asker, "cat", "/proc/net/tcp").splitlines()[1:])
        if peer in nodes
    }


def _peers_without_answer(table: Sequence[str]) -> Iterator[str]:
    """Remote addresses of rows of /proc/net/tcp whose retransmission timer has run out repeatedly."""
    for row in table:
        fields = row.split()
        unacknowledged = int(fields[4].split(":")[0], 16)
        if unacknowledged and int(fields[6], 16) >= _UNANSWERED_TIMEOUTS:
            yield _address(fields[2].split(":")[0])


def _address(word: str) -> str:
    """An IPv4 address from /proc/net/tcp, where its four bytes stand as one number of this machine."""
    return str(ipaddress.IPv4Address(int(word, 16).to_bytes(4, sys.byteorder)))


def _ranks(node: int, ranks_per_node: int) -> str:
    return f"{rank_words(node, ranks_per_node)} (node {node}, {address(node)})"


def rank_words(node: int, ranks_per_node: int) -> str:
    """`rank 3`, or `ranks 2, 3`: those of a node."""
    ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def with_ranks(text: str, nodes: int, ranks_per_node: int) -> str:
    """The text, with every address of a node followed by whose it is."""
    owners = {address(node): node for node in range(nodes)}

    def name(found: re.Match[str]) -> str:
        node = owners.get(found[1])
        return found[0] if node is None else f"{found[0]} (node {node}: {rank_words(node, ranks_per_node)})"

    return re.sub(r"\[?(?<![\d.])(\d+(?:\.\d+){3})\]?:\d+", name, text)
