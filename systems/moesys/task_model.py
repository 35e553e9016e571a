"""A model of several tasks whose experts are the tasks' own: routing by task, not by token (VIMER-UFO, section 5).

A stack of blocks: attention, then a feed-forward network that all tasks share beside one of the sample's own task. A
rank holds what is shared, and the branches of the tasks that it works on. In UFO a Gumbel-softmax chooses between the
two networks; here both run.

B samples, S positions, I features of a position, D model, F feed-forward, C classes of a task.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moebench.kernels.attention import attention
from moebench.kernels.expert_ffn import expert_ffn
from moebench.kernels.region import region
from moebench.kernels.rms_norm import rms_norm
from moebench.workloads.errors import InputError


@dataclass(frozen=True)
class TaskModelShape:
    """Sizes.

    Attributes:
        classes: of each task.
        shared_ffn, task_ffn: F of the network of all tasks, and of each task's own.

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
        block = 2 * d_model + 4 * d_model * d_model + 3 * d_model * self.shared_ffn
        return (self.features + self.sequence) * d_model + self.blocks * block + d_model

    def task_parameters(self, task: int) -> int:
        """Of a task's branch: its networks, its head."""
        return self.blocks * 3 * self.d_model * self.task_ffn + self.d_model * self.classes[task]


class FeedForward(nn.Module):
    """SwiGLU on [T, D]."""

    def __init__(self, d_model: int, d_ffn: int, like: Tensor) -> None:
        super().__init__()
        self.w1_DF = nn.Parameter(like.new_empty(d_model, d_ffn))
        self.w3_DF = nn.Parameter(like.new_empty(d_model, d_ffn))
        self.w2_FD = nn.Parameter(like.new_empty(d_ffn, d_model))

    def forward(self, x_TD: Tensor) -> Tensor:
        """silu(x w1) * (x w3) through w2."""
        with region("experts"):
            return expert_ffn(x_TD, self.w1_DF, self.w2_FD, self.w3_DF, "swiglu")


class Block(nn.Module):
    """Attention and the shared network; the task's own comes from outside."""

    def __init__(self, shape: TaskModelShape, like: Tensor) -> None:
        super().__init__()
        self.heads, d_model = shape.heads, shape.d_model
        self.norm1_D, self.norm2_D = (nn.Parameter(like.new_empty(d_model)) for _ in range(2))
        self.qkv_DC = nn.Parameter(like.new_empty(d_model, 3 * d_model))
        self.out_DD = nn.Parameter(like.new_empty(d_model, d_model))
        self.ffn = FeedForward(d_model, shape.shared_ffn, like)

    def forward(self, x_BSD: Tensor, branch: FeedForward) -> Tensor:
        """All samples of one task."""
        batch, sequence, d_model = x_BSD.shape
        with region("attention"):
            h_TD = rms_norm(x_BSD.flatten(0, 1), self.norm1_D)
            qkv = torch.mm(h_TD, self.qkv_DC).view(batch, sequence, 3, self.heads, d_model // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            y = attention(q, k, v, causal=False).transpose(1, 2).reshape(batch * sequence, d_model)
            x_TD = x_BSD.flatten(0, 1) + torch.mm(y, self.out_DD)
        with region("dense"):
            h_TD = rms_norm(x_TD, self.norm2_D)
            return (x_TD + self.ffn(h_TD) + branch(h_TD)).view(x_BSD.shape)


class TaskModel(nn.Module):
    """What one rank holds; parameters uninitialised.

    Args:
        tasks: whose branches.

    Raises:
        InputError: a task that the shape has not.
    """

    def __init__(
        self,
        shape: TaskModelShape,
        tasks: Iterable[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        held = sorted(set(tasks))
        if any(not 0 <= task < len(shape.classes) for task in held):
            raise InputError(f"tasks {held}: the model has tasks 0 to {len(shape.classes) - 1}")
        like = torch.empty(0, device=device, dtype=dtype)
        self.shape = shape
        self.embed_ID = nn.Parameter(like.new_empty(shape.features, shape.d_model))
        self.positions_SD = nn.Parameter(like.new_empty(shape.sequence, shape.d_model))
        self.blocks = nn.ModuleList(Block(shape, like) for _ in range(shape.blocks))
        self.norm_D = nn.Parameter(like.new_empty(shape.d_model))
        self.branches = nn.ModuleDict(
            {str(t): nn.ModuleList(FeedForward(shape.d_model, shape.task_ffn, like) for _ in range(shape.blocks))
             for t in held}
        )  # fmt: skip
        self.heads = nn.ParameterDict(
            {str(t): nn.Parameter(like.new_empty(shape.d_model, shape.classes[t])) for t in held}
        )

    def forward(self, x_BSI: Tensor, task: int) -> Tensor:
        """Logits [B, C] of samples of one task."""
        with region("dense"):
            x_BSD = torch.mm(x_BSI.flatten(0, 1), self.embed_ID).view(*x_BSI.shape[:2], -1) + self.positions_SD
        branch = self.branches[str(task)]
        assert isinstance(branch, nn.ModuleList)
        for block, own in zip(self.blocks, branch, strict=True):
            x_BSD = block(x_BSD, own)
        with region("dense"):
            return torch.mm(rms_norm(x_BSD.mean(1), self.norm_D), self.heads[str(task)])

    def of_task(self, task: int) -> list[nn.Parameter]:
        """Parameters of a branch."""
        return [*self.branches[str(task)].parameters(), self.heads[str(task)]]

    @property
    def shared(self) -> list[nn.Parameter]:
        """Parameters of all tasks."""
        own = {id(weight) for task in self.heads for weight in self.of_task(int(task))}
        return [weight for weight in self.parameters() if id(weight) not in own]

    @torch.no_grad()
    def initialise(self, seed: int = 0) -> None:
        """Normal weights that keep the variance, norms of 1; the same for a name and seed, whatever a rank holds."""
        for name, weight in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.copy_(drawn * weight.shape[0] ** -0.5)
