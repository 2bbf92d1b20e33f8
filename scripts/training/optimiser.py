"""Muon for the matrices of the layers, AdamW for the rest."""

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon (Jordan et al., 2024) on a stack of matrices."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


class Muon:
    """Muon for the matrices of the layers; matrices of one shape are stepped together."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95):
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self.groups = [(group, torch.zeros(len(group), *shape)) for shape, group in shapes.items()]
        self.momentum = momentum

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, mean in self.groups:
            gradient = torch.stack([p.grad for p in group])
            mean.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(mean, self.momentum))
            scale = rate * max(1.0, mean.shape[1] / mean.shape[2]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter -= scale * change


class Optimiser:
    """Muon for layer matrices, AdamW for the rest, one learning-rate schedule for both."""

    def __init__(self, module: nn.Module, steps: int, muon_rate: float, adam_rate: float):
        matrices, rest = [], []
        for name, parameter in module.named_parameters():
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > 16 and "embed" not in name
            (matrices if is_matrix else rest).append(parameter)
        self.muon, self.muon_rate = Muon(matrices), muon_rate
        self.adam = torch.optim.AdamW(
            [{"params": rest}], betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0
        )
        self.adam_rate, self.steps, self.done = adam_rate, steps, 0

    def schedule(self) -> float:
        """Warm up over 3 % of the steps; decay to zero over the last third."""
        warm_up = (self.done + 1) / max(1, 0.03 * self.steps)
        decay = 3 * (self.steps - self.done) / self.steps
        return min(1.0, warm_up, decay)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        factor = self.schedule()
        self.muon.step(factor * self.muon_rate)
        self.adam.param_groups[0]["lr"] = factor * self.adam_rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for group, _ in self.muon.groups:
            for parameter in group:
                parameter.grad = None
        self.done += 1
