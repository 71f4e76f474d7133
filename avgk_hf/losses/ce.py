"""Cross-entropy, the baseline whose softmax is thresholded."""

import torch.nn.functional as F
from torch import Tensor

from .base import Loss


class CrossEntropyLoss(Loss):
    r"""Cross-entropy of the only head (section 4.3).

    .. math::
        \ell = -\frac{1}{B} \sum_i \log softmax(z_i)_{y_i}

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

    def compute(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)
