"""Cross-entropy, the baseline whose softmax is thresholded."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .base import Loss
from .labels import check_labels, widen


class CrossEntropyLoss(Loss):
    r"""Cross-entropy of the only head.

    .. math::
        \ell = -\frac{1}{B} \sum_i \log softmax(z_i)_{y_i}

    Reference:
        Garcin et al., "A two-head loss function for deep Average-K classification", section 4.3.

    Inputs:
        - outputs: `.logits` (B, L)
        - labels: (B,), each in [0, L)
        - index: not used

    Relation to the other losses:
        - `AvgKLoss` trains its SCCP head with this loss and adds a second head.

    Example:
        >>> import torch
        >>> from avgk_hf.modeling import AvgKOutput
        >>> loss = CrossEntropyLoss()(AvgKOutput(logits=torch.zeros(4, 10)), torch.tensor([0, 3, 3, 9]))
        >>> round(loss.item(), 4)  # log 10
        2.3026
    """

    sentence = "Trained with cross-entropy; its scores are thresholded."
    needs_k = False

    def forward(self, outputs: Any, labels: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the scalar loss."""
        check_labels(labels, outputs.logits)
        return F.cross_entropy(widen(outputs.logits), labels)
