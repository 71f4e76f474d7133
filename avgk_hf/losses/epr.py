"""Expected positive regularisation: the label is a positive, and K positives are expected on average."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..processes import mean_over_processes
from .base import Hyperparameter, Loss


class ExpectedPositiveLoss(Loss):
    r"""EPR: positive binary cross-entropy, with the mean number of predicted positives held near K.

    .. math::
        \ell = -\frac{1}{B} \sum_i \log \sigma(z_{i y_i}) + \beta (\hat{K} - K)^2, \qquad
        \hat{K} = \frac{1}{B} \sum_{ij} \sigma(z_{ij})

    With several processes, K_hat is the mean over the images of all of them. Section 4.5, after Cole et al., in whose
    public code beta is divided by L^2: a value tuned there does not carry over.

    Relation to the other losses:
        - `AssumeNegativeLoss` pushes every other class down; here only their number is bounded.
        - `OnlineLabelLoss` (ROLE) adds estimates of the unobserved labels.

    Example:
        >>> from avgk_hf.modeling import AvgKOutput
        >>> outputs = AvgKOutput(logits=torch.zeros(4, 10))  # K_hat = 5
        >>> round(ExpectedPositiveLoss(k=2, beta=0.1)(outputs, torch.tensor([0, 3, 3, 9])).item(), 4)  # log 2 + 0.9
        1.5931
    """

    sentence = "Trained with expected positive regularisation (EPR): the label is positive, K positives are expected."
    hyperparameters: ClassVar = {"beta": Hyperparameter(0.01, "Weight of the regulariser.")}

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        expected = logits.sigmoid().sum() / len(labels)
        if torch.is_grad_enabled():  # evaluation gives processes different numbers of batches
            expected = mean_over_processes(expected)
        return F.softplus(-logits.gather(1, labels[:, None])).mean() + self.beta * (expected - self.k) ** 2
