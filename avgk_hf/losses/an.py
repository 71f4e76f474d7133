"""Assume negative: every class but the label counts as a negative, together as much as the label."""

import torch.nn.functional as F
from torch import Tensor

from .base import Loss


class AssumeNegativeLoss(Loss):
    r"""AN: binary cross-entropy with the label as the only positive and the negatives weighted by 1 / (L - 1).

    .. math::
        \ell = -\frac{1}{B} \sum_i \Big[ \log \sigma(z_{i y_i})
               + \frac{1}{L - 1} \sum_{j \neq y_i} \log(1 - \sigma(z_{ij})) \Big]

    Section 4.4. In the public code of Cole et al. this weighting is their weak variant (WAN); what they call AN there
    has weight 1.

    Relation to the other losses:
        - `AvgKLoss` with K = 1 and alpha = 1 trains its ML head with this loss.
        - `ExpectedPositiveLoss` drops the negatives and bounds the number of positives instead.

    Example:
        >>> import torch
        >>> from avgk_hf.modeling import AvgKOutput
        >>> loss = AssumeNegativeLoss()(AvgKOutput(logits=torch.zeros(4, 10)), torch.tensor([0, 3, 3, 9]))
        >>> round(loss.item(), 4)  # 2 log 2
        1.3863
    """

    sentence = "Trained with the assume-negative loss (AN): binary cross-entropy with the label as the only positive."
    needs_k = False

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        own = logits.gather(1, labels[:, None])  # (B, 1)
        negatives = F.softplus(logits).scatter(1, labels[:, None], 0.0)  # (B, L)
        return (F.softplus(-own).sum() + negatives.sum() / max(logits.shape[1] - 1, 1)) / len(labels)
