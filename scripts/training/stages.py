"""The stages of training, from text to what the trunk writes itself."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import Encoded, self_text, shuffled
from .loop import Recipe, train
from .optimiser import Optimiser
from .pair import Pair


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_loss(model: Pair, ids: Tensor) -> tuple[Tensor, list[float]]:
    """Next-token loss and, on every second row, the head's losses at depths 1 and 2."""
    length = ids.shape[1] - 3
    reading = model.trunk(ids[:, :length])
    losses = [token_loss(model.trunk.logits(reading.hidden), ids[:, 1 : length + 1])]
    ids = ids[::2]
    for k, state in enumerate(model.follow(reading[::2, :], ids, 2), 1):
        targets = ids[:, k + 1 : k + 1 + length]
        losses.append(token_loss(model.draft_logits(state), targets))
    total = losses[0] + 0.3 * losses[1] + 0.15 * losses[2]
    return total, [loss.item() for loss in losses]


def distil_loss(model: Pair, ids: Tensor, depth: int) -> tuple[Tensor, list[float]]:
    """At each depth the mean of the KL divergence from the trunk and the loss on its argmax."""
    length = ids.shape[1] - depth
    with torch.no_grad():
        reading = model.trunk(ids)
        teacher = model.trunk.logits(reading.hidden).log_softmax(-1)
    losses = []
    for k, state in enumerate(model.follow(reading[:, :length], ids, depth), 1):
        student = model.draft_logits(state).log_softmax(-1).flatten(0, 1)
        wanted = teacher[:, k : k + length].flatten(0, 1)
        divergence = F.kl_div(student, wanted, reduction="batchmean", log_target=True)
        losses.append(0.5 * divergence + 0.5 * F.nll_loss(student, wanted.argmax(-1)))
    return torch.stack(losses).mean(), [loss.item() for loss in losses]


def run_stages(
    model: Pair,
    data: Encoded,
    chats: list[list[int]],
    recipe: Recipe,
    seed: int,
    first: int,
    checkpoint: Callable[[], None],
) -> dict[str, list[float]]:
    """Train from stage `first` on. Returns the last training losses of every stage."""
    losses: dict[str, list[float]] = {}
    if first <= 1:
        optimiser = Optimiser(model, recipe.text_steps, muon_rate=0.03, adam_rate=1e-2)
        batches = data.batches(recipe.rows, recipe.length + 3, seed)
        losses["text"] = train(
            "text", batches, optimiser, lambda ids: text_loss(model, ids), checkpoint
        )
    model.round_to_bfloat16(model.trunk)
    model.trunk.requires_grad_(False)

    def distil(ids: Tensor) -> tuple[Tensor, list[float]]:
        return distil_loss(model, ids, recipe.depth)

    if first <= 2:
        optimiser = Optimiser(model.head, recipe.distil_steps, muon_rate=0.02, adam_rate=4e-3)
        batches = data.batches(recipe.rows, recipe.length + recipe.depth, seed + 100_000)
        losses["distil"] = train("distil", batches, optimiser, distil, checkpoint)
    if first <= 3:
        started = time.monotonic()
        rows = self_text(model, data, chats, recipe)
        print(f"wrote {rows.numel()} tokens in {time.monotonic() - started:.0f} s", flush=True)
        optimiser = Optimiser(model.head, recipe.self_steps, muon_rate=0.01, adam_rate=2e-3)
        batches = shuffled(rows, recipe.self_rows, seed + 200_000)
        losses["self"] = train("self", batches, optimiser, distil, checkpoint)
    model.round_to_bfloat16(model.head)
    batches = data.batches(recipe.rows, recipe.length + recipe.depth, seed + 300_000)
    return losses | model.finish(batches, recipe)
