"""What is right for systems that train decoders: one rank, whole weights, operators written out, Adam by formula."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.rms_norm import rms_norm_reference
from moebench.systems.job_interface import Training
from moebench.systems.megascale.plain import plain_layer
from moebench.systems.megascale.weights import DecoderWeights, random_weights
from moebench.workloads.models.decoder import DecoderModel


def random_model(model: DecoderModel, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """All weights of a model by the names of `JobStage.load`; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (model.vocabulary, model.shape.d_model)
    found = {"tokens": 0.5 * torch.randn(sizes, generator=generator, dtype=dtype)}
    for number in range(model.layers):
        weights = random_weights(model.shape, dtype, seed=seed + 1 + number).named()
        found |= {f"{number}.{name}": weight for name, weight in weights.items()}
    found["norm"] = 1 + 0.1 * torch.randn(model.shape.d_model, generator=generator, dtype=dtype)
    if not model.tied:
        found["head"] = 0.3 * torch.randn(sizes, generator=generator, dtype=dtype)
    return found


class OneRank:
    """A model on one rank.

    Attributes:
        weights: by name; they need gradients.
    """

    def __init__(self, model: DecoderModel, weights: Mapping[str, Tensor], training: Training) -> None:
        self.model, self.training = model, training
        self.weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        self._averages = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._squares = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._steps = 0

    def loss(self, ids_SB: Tensor, labels_SB: Tensor) -> Tensor:
        """Mean negative log-likelihood of the labels."""
        x_SBD, _ = self._through_layers(ids_SB)
        h_TD = rms_norm_reference(x_SBD.flatten(0, 1), self.weights["norm"], self.model.shape.eps)
        logits_TV = h_TD @ self.weights["tokens" if self.model.tied else "head"].t()
        return F.nll_loss(F.log_softmax(logits_TV, dim=1), labels_SB.flatten())

    def _through_layers(self, ids_SB: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Rows after the last layer, and what the router of each made of those before it, probs_TE."""
        x_SBD, probs = F.embedding(ids_SB, self.weights["tokens"]), []
        for number in range(self.model.layers):
            own = {name.partition(".")[2]: w for name, w in self.weights.items() if name.startswith(f"{number}.")}
            x_SBD, probs_TE, _ = plain_layer(x_SBD, DecoderWeights(**own), self.model.shape)
            probs.append(probs_TE)
        return x_SBD, probs

    @torch.no_grad()
    def clearness(self, ids_SB: Tensor) -> Tensor:
        """[B] how far the closest call of a sequence is from a tie: between the last expert chosen and the next one,
        as a difference of logits."""
        _, probs = self._through_layers(ids_SB)
        best_LTK = torch.stack(probs).topk(self.model.shape.top_k + 1).values.log()
        return (best_LTK[..., -2] - best_LTK[..., -1]).view(-1, *ids_SB.shape).amin((0, 1))

    def step(self, ids_SB: Tensor, labels_SB: Tensor) -> Tensor:
        """The loss of a batch, on which Adam then makes a step."""
        loss = self.loss(ids_SB, labels_SB)
        names = list(self.weights)
        gradients = torch.autograd.grad(loss, [self.weights[name] for name in names])
        told = self.training
        self._steps += 1
        first, second = told.betas
        with torch.no_grad():
            for name, gradient in zip(names, gradients, strict=True):
                average, square, weight = self._averages[name], self._squares[name], self.weights[name]
                average.mul_(first).add_((1 - first) * gradient)
                square.mul_(second).add_((1 - second) * gradient**2)
                size = (square / (1 - second**self._steps)).sqrt() + told.eps
                weight.mul_(1 - told.learning_rate * told.weight_decay)
                weight.sub_(told.learning_rate * average / (1 - first**self._steps) / size)
        return loss.detach()
