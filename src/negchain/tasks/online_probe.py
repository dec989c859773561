"""A linear classifier on detached embeddings, trained beside the encoder: a number for the log.

Shapes: B batch, D embedding, C classes.
"""

import torch
from torch import Tensor

RATE = 0.5  # of its steps; embeddings have unit length, times SHARPNESS
SHARPNESS = 10.0
MEMORY = 0.95  # of the running accuracy


class OnlineProbe:
    """Classifies each batch before it learns from it; `accuracy` is a running mean.

    Everything stays on the device and has a fixed shape, so a step with it can be a CUDA graph.

    Args:
        labels: [M] of all training images; below 0 where there is none.
        dim: D.

    Example:
        >>> probe = OnlineProbe(torch.tensor([0, 1]).repeat(50), dim=2)
        >>> for step in range(50):
        ...     index = torch.arange(8) + step
        ...     probe.learn(torch.eye(2)[index % 2], index)
        >>> float(probe.accuracy) > 0.9
        True
    """

    def __init__(self, labels: Tensor, dim: int) -> None:
        self.labels = labels
        zeros = torch.zeros(int(labels.max()) + 1, dim + 1, device=labels.device)
        self.weight = zeros  # [C, D + 1]: the last column is the bias
        self._mean = torch.zeros(2, device=labels.device)  # right answers, answers

    def learn(self, embeddings: Tensor, index: Tensor) -> None:
        """Answer for the images at `index` [B] by their embeddings [B,D], then take a step."""
        with torch.no_grad():
            z = SHARPNESS * torch.nn.functional.normalize(embeddings.detach().float(), dim=-1)
            z = torch.cat([z, torch.ones_like(z[:, :1])], 1)
            labels = self.labels[index]
            labelled = (labels >= 0).float()
            logits = z @ self.weight.T
            right = (logits.argmax(1) == labels).float() * labelled
            now = torch.stack([right.sum(), labelled.sum()])
            self._mean.copy_(torch.where(now[1] > 0, MEMORY * self._mean + now, self._mean))
            classes = torch.arange(len(self.weight), device=labels.device)
            error = logits.softmax(1) - (labels[:, None] == classes).float()
            error *= (labelled / labelled.sum().clamp_min(1))[:, None]
            self.weight -= RATE * (error.T @ z)

    @property
    def accuracy(self) -> Tensor:
        """The share of right answers, recent batches counting most."""
        return self._mean[0] / self._mean[1].clamp_min(1)

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """What a step changes, for checkpoints."""
        return self.weight, self._mean
