"""The balanced noised top-K loss: a smoothed hinge between the label and the (K + 1)-th largest score."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Hyperparameter, Loss


class NoisedTopKLoss(Loss):
    r"""TOP-K: the label's score should exceed the smoothed (K + 1)-th largest score by a margin of 1.

    .. math::
        \ell = \frac{1}{B} \sum_i \max(0, 1 + \tilde{s}_{[K+1]}(z_i) - z_{i y_i}), \qquad
        \tilde{s}_{[k]}(z) = \frac{1}{S} \sum_{s=1}^{S} (z + \epsilon Z_s)_{[k]}, \quad Z_s \sim N(0, I)

    where v_[k] is the k-th largest entry of v, and of a fractional K the whole part is used. The gradient of the
    smoothed score is the mean indicator of the perturbed k-th place. The baseline TOP-K of the paper, from Garcin et
    al., "Stochastic smoothing of the top-K calibrated hinge loss for deep imbalanced classification" (ICML 2022).

    The loss has no probabilities, so either of two scores can be thresholded: the raw logits (`score: logit`, what the
    hinge compares) or their softmax (`score: softmax`, what the paper's evaluation does for every loss and the default
    here). They order the classes of one image alike, but not the classes of different images.

    Args:
        num_samples: Number S of noise vectors.

    Inputs:
        - noise: (B, L, S), drawn if not given

    Relation to the other losses:
        - The other losses threshold over the batch or the dataset; this one asks for K classes in every image.

    Example:
        >>> from avgk_hf.modeling import AvgKOutput
        >>> outputs = AvgKOutput(logits=torch.tensor([[3.0, 1.0, 0.5, 0.0]]))
        >>> NoisedTopKLoss(k=2, epsilon=0.0)(outputs, torch.tensor([3])).item()  # 1 + 0.5 - 0
        1.5
    """

    sentence = "Trained with the balanced noised top-K hinge loss."
    hyperparameters: ClassVar = {"epsilon": Hyperparameter(1.0, "Standard deviation of the noise.")}

    def __init__(self, k: float, num_samples: int = 5, **hyperparameters: Any) -> None:
        super().__init__(k, **hyperparameters)
        self.k = int(self.k)
        self.num_samples = num_samples

    def compute(self, logits: Tensor, labels: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is None:
            noise = torch.randn(*logits.shape, self.num_samples, device=logits.device, dtype=logits.dtype)
        noised = logits[..., None] + self.epsilon * noise  # (B, L, S)
        smoothed = noised.topk(self.k + 1, dim=1).values[:, -1].mean(-1)  # (B,)
        own = logits.gather(1, labels[:, None])[:, 0]
        # a NaN that is not the label's would sort to the top and be seen by nobody
        return (1 + smoothed - own).relu().mean() + 0 * logits.detach().amax()
