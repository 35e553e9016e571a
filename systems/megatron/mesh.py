"""The ranks that share a layer as tensor-parallel groups side by side (Megatron's order: tensor ranks are neighbours).

Of n ranks, t neighbours cut attention and every expert among them and take the same sequences; the n / t ranks at the
same place of their groups have different sequences and, as expert parallelism goes over the data-parallel ranks,
different experts.
"""

from dataclasses import dataclass

from moebench.kernels.collectives.group import Group, subgroup
from moebench.workloads.errors import InputError


@dataclass(frozen=True)
class Mesh:
    """This rank's groups.

    Attributes:
        all: the n ranks; tensor: t of them; expert: the n / t with this one's place in their tensor groups.
    """

    all: Group
    tensor: Group
    expert: Group


_known: dict[tuple[str, int], Mesh] = {}


def mesh_of(group: Group, tensor_parallel: int) -> Mesh:
    """The groups of a rank; the same for every layer, as making one takes all of its ranks.

    Raises:
        InputError: ranks that are not a multiple of the degree.
    """
    if tensor_parallel < 1 or group.size % tensor_parallel:
        raise InputError(f"ranks = {group.size} are not a multiple of tensor_parallel = {tensor_parallel}")
    key = (group.key, tensor_parallel)
    if key not in _known:
        first = group.index // tensor_parallel * tensor_parallel
        tensor = subgroup(group, "tensor", group.ranks[first : first + tensor_parallel])
        expert = subgroup(group, "expert", group.ranks[group.index % tensor_parallel :: tensor_parallel])
        _known[key] = Mesh(group, tensor, expert)
    return _known[key]
