"""The output head of Gemma-4's small assistants: it scores the likeliest token clusters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def balanced_clusters(vectors: Tensor, count: int) -> Tensor:
    """Row numbers (count, size) of clusters of equal size; count is a power of two.

    Each group is halved at the median of its direction of greatest variance.
    """
    groups = torch.arange(len(vectors))[None]
    while len(groups) < count:
        members = vectors[groups]  # (groups, size, D)
        centred = members - members.mean(1, keepdim=True)
        direction = torch.linalg.eigh(centred.mT @ centred).eigenvectors[..., -1:]
        order = (centred @ direction)[..., 0].argsort(1)
        groups = groups.gather(1, order).view(2 * len(groups), -1)
    return groups


class OrderedHead(nn.Module):
    """`token_ordering` lists the ids of cluster 0, then those of cluster 1, and so on."""

    def __init__(self, size: int, vocab_size: int, clusters: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.centroids = nn.Linear(size, clusters, bias=False)
        self.register_buffer("token_ordering", torch.arange(vocab_size))

    def cluster(self, embedding: Tensor) -> None:
        """Choose the clusters, and for centroids the means of their embeddings."""
        ids = balanced_clusters(embedding, self.centroids.out_features)
        self.token_ordering.copy_(ids.flatten())
        self.centroids.weight.data.copy_(embedding[ids].mean(1))

    def choose(self, state: Tensor, logits: Tensor) -> Tensor:
        """The best token of the top_k clusters: logits (..., V) -> ids (...)."""
        top = self.centroids(state).topk(self.top_k).indices  # (..., top_k)
        ids = self.token_ordering.view(self.centroids.out_features, -1)[top].flatten(-2)
        best = logits.gather(-1, ids).argmax(-1, keepdim=True)
        return ids.gather(-1, best)[..., 0]

    def loss(self, state: Tensor, logits: Tensor) -> Tensor:
        """Cross entropy of the clusters' shares of the whole head's probability."""
        by_cluster = logits[..., self.token_ordering].unflatten(
            -1, (self.centroids.out_features, -1)
        )
        shares = (by_cluster.logsumexp(-1) - logits.logsumexp(-1, keepdim=True)).exp()
        return F.cross_entropy(self.centroids(state).flatten(0, -2), shares.flatten(0, -2))
