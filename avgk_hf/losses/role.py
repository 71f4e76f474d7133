"""Regularised online label estimation: unobserved labels are estimated while the model is trained."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..processes import gather, world_size
from ..sets import check_k
from .base import Hyperparameter, Loss
from .epr import ExpectedPositiveLoss

UNOBSERVED = math.log(0.6 / 0.4)  # estimates of unobserved labels start between 0.4 and 0.6
OBSERVED = math.log(0.995 / 0.005)  # those of observed labels at 0.995


class OnlineLabelLoss(Loss):
    r"""ROLE: predictions sigma(Z) and label estimates sigma(Theta) are trained to match each other.

    .. math::
        \ell = \tfrac{1}{2} [\ell'(Z \mid \Theta) + \ell'(\Theta \mid Z)], \qquad
        \ell'(A \mid C) = EPR_\lambda(A)
        - \frac{1}{B} \sum_{ij} \big[ \sigma(c_{ij}) \log \sigma(a_{ij})
        + (1 - \sigma(c_{ij})) \log(1 - \sigma(a_{ij})) \big]

    where no gradient flows into what stands behind the bar, and EPR_lambda is `ExpectedPositiveLoss` with that beta.
    Theta (n, L) has a row for every training image, found by the image's `index`. Without `index` (evaluation) the
    estimates are unknown, and the loss is EPR_lambda(Z). Of several processes each holds all of Theta and applies the
    gradients of all images, so that the copies stay equal. Section 4.6, after Cole et al., whose public code divides
    all of it by L and the regulariser by L^2 once more.

    Args:
        num_examples: Number of training images n.
        num_labels: Number of classes L.

    Relation to the other losses:
        - `ExpectedPositiveLoss` is what remains when nothing is known about the unobserved labels.
        - `AvgKLoss` also trains on estimated labels, but takes them from a second head and needs no memory per image.

    Example:
        >>> from avgk_hf.modeling import AvgKOutput
        >>> loss = OnlineLabelLoss(k=2, num_examples=50, num_labels=10)
        >>> outputs, labels = AvgKOutput(logits=torch.zeros(2, 10)), torch.tensor([3, 4])
        >>> loss(outputs, labels, index=torch.tensor([7, 49])).shape, loss.theta.shape
        (torch.Size([]), torch.Size([50, 10]))
    """

    sentence = "Trained with ROLE: labels that were not observed are estimated for every training image."
    hyperparameters: ClassVar = {
        "role_lambda": Hyperparameter(0.0, "Weight of the regulariser."),
        "theta_lr": Hyperparameter(1.0, "Learning rate of the label estimates, as a factor."),
    }
    has_state = per_image = True

    def __init__(self, k: float, num_examples: int, num_labels: int, **hyperparameters: Any) -> None:
        super().__init__(check_k(k, num_labels), **hyperparameters)
        self.learning_rate_factor = self.theta_lr
        self.positives = ExpectedPositiveLoss(k, beta=self.role_lambda)
        self.theta = nn.Parameter(torch.empty(num_examples, num_labels).uniform_(-UNOBSERVED, UNOBSERVED))
        self.register_buffer("seen", torch.zeros(num_examples, dtype=torch.bool))

    def compute(self, logits: Tensor, labels: Tensor, index: Tensor | None) -> Tensor:
        if index is None or not torch.is_grad_enabled():
            return self.positives.compute(logits, labels)
        if index.device.type == "cpu" and not ((index >= 0) & (index < len(self.theta))).all():
            raise ValueError(
                f"an index lies outside [0, {len(self.theta)}), the training images ROLE was built for: number them"
                " from 0 in the column `index`."
            )
        self._observe(labels, index)
        theta = _Rows.apply(self.theta, index).to(logits.dtype)  # (B, L)
        return (self._side(logits, theta, labels) + self._side(theta, logits, labels)) / 2

    def _side(self, logits: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        cross = F.binary_cross_entropy_with_logits(logits, targets.detach().sigmoid(), reduction="sum") / len(labels)
        return self.positives.compute(logits, labels) + cross

    @torch.no_grad()
    def _observe(self, labels: Tensor, index: Tensor) -> None:
        """Set the estimate of an image's label to 0.995 when the image is seen for the first time."""
        labels, index = gather(labels).view(-1), gather(index).view(-1)  # of all processes
        own = self.theta[index, labels]
        self.theta[index, labels] = torch.where(self.seen[index], own, torch.full_like(own, OBSERVED))
        self.seen[index] = True


class _Rows(torch.autograd.Function):
    """Rows of a matrix, whose gradient is the mean over all processes: few rows travel, not the matrix."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = matrix.shape
        return matrix[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        rows = gather(grad).view(-1, ctx.shape[1]) / world_size()  # (W B, L)
        return grad.new_zeros(ctx.shape).index_add_(0, gather(index).view(-1), rows), None
