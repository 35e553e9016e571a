"""A model of several tasks whose experts are the tasks' own: routing by task, not by token (VIMER-UFO, section 5).

A stack of blocks: attention, then for every sample one of two feed-forward networks, the one that all tasks share or
the one of its task (task_paths.py). A rank holds what is shared, and the branches of the tasks that it works on.
Samples of all tasks go through attention and the shared network together.

B samples, S positions, I features of a position, D model, F feed-forward, C classes of a task, P = 2 paths.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moebench.kernels.attention import attention
from moebench.kernels.expert_ffn import expert_ffn
from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.systems.moesys.task_paths import OWN, SHARED, TEMPERATURE, path_weights
from moebench.workloads.errors import InputError

# (block, normed rows [B, S, D]) -> what the block's networks make of them.
Feed = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class TaskModelShape:
    """Sizes.

    Attributes:
        classes: of each task.
        shared_ffn, task_ffn: F of the network of all tasks, and of each task's own.
        temperature, is_hard: of the choice between them, see `path_weights`.

    Raises:
        InputError: one is below 1, or heads do not divide d_model.
    """

    features: int
    sequence: int
    d_model: int
    heads: int
    blocks: int
    shared_ffn: int
    task_ffn: int
    classes: tuple[int, ...]
    temperature: float = TEMPERATURE
    is_hard: bool = True

    def __post_init__(self) -> None:
        for name in ("features", "sequence", "d_model", "heads", "blocks", "shared_ffn", "task_ffn"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.d_model % self.heads:
            raise InputError(f"d_model = {self.d_model} is not divisible by heads = {self.heads}")
        if not self.classes or min(self.classes) < 2:
            raise InputError(f"classes = {self.classes}: at least one task, each with at least 2 classes")

    @property
    def shared_parameters(self) -> int:
        """That every rank holds."""
        d_model = self.d_model
        block = 2 * d_model + 4 * d_model * d_model + 2 * d_model * self.shared_ffn
        return (self.features + self.sequence) * d_model + self.blocks * block + d_model

    def task_parameters(self, task: int) -> int:
        """Of a task: its networks, the logits of their choice, its head."""
        return self.blocks * (2 * self.d_model * self.task_ffn + 2) + self.d_model * self.classes[task]


class FeedForward(nn.Module):
    """Two products with a GELU between, on [T, D]."""

    def __init__(self, d_model: int, d_ffn: int, like: Tensor) -> None:
        super().__init__()
        self.w1_DF = nn.Parameter(like.new_empty(d_model, d_ffn))
        self.w2_FD = nn.Parameter(like.new_empty(d_ffn, d_model))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """gelu(x w1) w2."""
        with region("experts"):
            return expert_ffn(x_BSD.flatten(0, 1), self.w1_DF, self.w2_FD, None, "gelu").view(x_BSD.shape)


class Block(nn.Module):
    """Attention and the shared network; what a task has of its own comes from outside."""

    def __init__(self, shape: TaskModelShape, like: Tensor) -> None:
        super().__init__()
        self.heads, d_model = shape.heads, shape.d_model
        self.norm1_D, self.norm2_D = (nn.Parameter(like.new_empty(d_model)) for _ in range(2))
        self.qkv_DC = nn.Parameter(like.new_empty(d_model, 3 * d_model))
        self.out_DD = nn.Parameter(like.new_empty(d_model, d_model))
        self.ffn = FeedForward(d_model, shape.shared_ffn, like)

    def attend(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The rows behind attention, and the same normed for the networks."""
        batch, sequence, d_model = x_BSD.shape
        with region("attention"):
            h_TD = rms_norm(x_BSD.flatten(0, 1), self.norm1_D)
            qkv = torch.mm(h_TD, self.qkv_DC).view(batch, sequence, 3, self.heads, d_model // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            y = attention(q, k, v, causal=False).transpose(1, 2).reshape(batch * sequence, d_model)
            x_TD = x_BSD.flatten(0, 1) + torch.mm(y, self.out_DD)
        with region("dense"):
            return x_TD.view(x_BSD.shape), rms_norm(x_TD, self.norm2_D).view(x_BSD.shape)


class Branch(nn.Module):
    """What a task has of its own in the blocks: a network and two logits each."""

    def __init__(self, shape: TaskModelShape, like: Tensor) -> None:
        super().__init__()
        self.ffns = nn.ModuleList(FeedForward(shape.d_model, shape.task_ffn, like) for _ in range(shape.blocks))
        self.logits = nn.ParameterList(nn.Parameter(like.new_empty(2)) for _ in range(shape.blocks))


class TaskModel(nn.Module):
    """What one rank holds; parameters uninitialised.

    Args:
        tasks: whose branches.
        heads: of which tasks; default the same.
        recomputes: whether the backward runs each block once more, of which only the input is kept.

    Raises:
        InputError: a task that the shape has not.
    """

    def __init__(
        self,
        shape: TaskModelShape,
        tasks: Iterable[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        recomputes: bool = False,
        heads: Iterable[int] | None = None,
    ) -> None:
        super().__init__()
        held = sorted(set(tasks))
        headed = held if heads is None else sorted(set(heads))
        if any(not 0 <= task < len(shape.classes) for task in (*held, *headed)):
            raise InputError(f"tasks {held}: the model has tasks 0 to {len(shape.classes) - 1}")
        like = torch.empty(0, device=device, dtype=dtype)
        self.shape, self.recomputes = shape, recomputes
        self.embed_ID = nn.Parameter(like.new_empty(shape.features, shape.d_model))
        self.positions_SD = nn.Parameter(like.new_empty(shape.sequence, shape.d_model))
        self.blocks = nn.ModuleList(Block(shape, like) for _ in range(shape.blocks))
        self.norm_D = nn.Parameter(like.new_empty(shape.d_model))
        self.branches = nn.ModuleDict({str(task): Branch(shape, like) for task in held})
        self.heads = nn.ParameterDict(
            {str(task): nn.Parameter(like.new_empty(shape.d_model, shape.classes[task])) for task in headed}
        )

    def branch(self, task: int) -> Branch:
        """A task's; it must be held."""
        found = self.branches[str(task)]
        assert isinstance(found, Branch)
        return found

    def forward(
        self, batches: Mapping[int, Tensor], uniform: Mapping[int, Tensor], feed: Feed | None = None
    ) -> dict[int, Tensor]:
        """Logits [B, C] by task, in training.

        Args:
            batches: samples [B, S, I] of each task.
            uniform: numbers of each task's samples, [B, blocks, P], which their paths are drawn by.
            feed: what takes the rows through the networks where these are on other ranks too; default `networks` here.
        """
        tasks, counts = sorted(batches), [len(batches[task]) for task in sorted(batches)]

        def here(block: int, h_BSD: Tensor) -> Tensor:
            return self.networks(block, h_BSD, tasks, counts, uniform)

        with region("dense"):
            x_BSI = torch.cat([batches[task] for task in tasks])
            x_BSD = torch.mm(x_BSI.flatten(0, 1), self.embed_ID).view(*x_BSI.shape[:2], -1) + self.positions_SD
        for block in range(len(self.blocks)):
            x_BSD = self._through(block, x_BSD, feed or here)
        with region("dense"):
            y_BD = rms_norm(x_BSD.mean(1), self.norm_D)
            heads = zip(tasks, y_BD.split(counts), strict=True)
            return {task: torch.mm(y, self.heads[str(task)]) for task, y in heads}

    def networks(
        self, block: int, h_BSD: Tensor, tasks: Sequence[int], counts: Sequence[int], uniform: Mapping[int, Tensor]
    ) -> Tensor:
        """Both networks of a block, each times its weight.

        Args:
            tasks, counts: of the samples, whose ranks these are, and how many of each in order.
        """
        shared_BSD = self._block(block).ffn(h_BSD)
        with region("dispatch"):
            of_task = zip(tasks, h_BSD.split(list(counts)), shared_BSD.split(list(counts)), strict=True)
        parts = []
        for task, h, s in of_task:
            branch = self.branch(task)
            own = branch.ffns[block](h)
            with region("gate"):
                weights_BP = path_weights(
                    branch.logits[block], uniform[task][:, block], self.shape.temperature, self.shape.is_hard
                )
            with region("combine"):
                parts.append(_times(s, weights_BP[:, SHARED]) + _times(own, weights_BP[:, OWN]))
        with region("combine"):
            return torch.cat(parts) if len(parts) > 1 else parts[0]

    def paths(self, task: int) -> list[int]:
        """Which network a task takes in each block once it is trained; reads the logits on the host."""
        return [OWN if shared < own else SHARED for shared, own in (one.tolist() for one in self.branch(task).logits)]

    @torch.no_grad()
    def evaluate(self, x_BSI: Tensor, task: int) -> Tensor:
        """Logits [B, C] of samples of one task, through one network a block: no noise, and the other is not run."""
        paths, branch = self.paths(task), self.branch(task)

        def chosen(block: int, h_BSD: Tensor) -> Tensor:
            return (branch.ffns[block] if paths[block] == OWN else self._block(block).ffn)(h_BSD)

        return self({task: x_BSI}, {}, chosen)[task]

    def _block(self, place: int) -> Block:
        found = self.blocks[place]
        assert isinstance(found, Block)
        return found

    def _through(self, block: int, x_BSD: Tensor, feed: Feed) -> Tensor:
        def run(x: Tensor) -> Tensor:
            x, h = self._block(block).attend(x)
            y = feed(block, h)
            with region("dense"):
                return x + y

        if not (self.recomputes and torch.is_grad_enabled()):
            return run(x_BSD)
        return checkpoint(run, x_BSD, use_reentrant=False, preserve_rng_state=False)

    def of_task(self, task: int, with_head: bool = True) -> list[nn.Parameter]:
        """Parameters of a branch, and of the task's head."""
        return [*self.branch(task).parameters(), *([self.heads[str(task)]] if with_head else [])]

    @property
    def shared(self) -> list[nn.Parameter]:
        """Parameters of all tasks: neither branches nor heads."""
        own = {id(weight) for part in (self.branches, self.heads) for weight in part.parameters()}
        return [weight for weight in self.parameters() if id(weight) not in own]

    @torch.no_grad()
    def initialise(self, seed: int = 0) -> None:
        """Normal weights that keep the variance, norms of 1, logits of 0; the same for a name and seed, whatever a rank
        holds."""
        for name, weight in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if weight.dim() == 1:
                weight.fill_(0.0 if ".logits." in name else 1.0)
            else:
                drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.copy_(drawn * weight.shape[0] ** -0.5)


def _times(x_BSD: Tensor, weights_B: Tensor) -> Tensor:
    return x_BSD * weights_B.to(x_BSD.dtype).view(-1, 1, 1)
