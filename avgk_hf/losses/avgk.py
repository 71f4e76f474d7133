"""The AVG-K loss of the paper: a softmax head proposes candidate classes, a multi-label head is trained on them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .labels import check_labels, widen


class AvgKLoss(nn.Module):
    r"""AVG-K: cross-entropy on the SCCP head plus binary cross-entropy on the ML head with pseudo-labels.

    For logits Z (ML) and Z' (SCCP), both (B, L), and labels y (B,):

    .. math::
        \ell = CE(Z', y) - \frac{1}{B} \sum_i \log \sigma(z_{i y_i})
               - \frac{\alpha}{M} \sum_{(i,j) \in C} \log \sigma(z_{ij})
               - \frac{\alpha}{N} \sum_{(i,j) \notin C, j \neq y_i} \log(1 - \sigma(z_{ij}))

    where the candidates C are the M = round((K - 1) B) largest entries of softmax(Z') over the *whole batch*, the true
    labels left out, and N = B L - B - M the remaining entries. No gradient flows through the choice. An empty group
    contributes 0. Computed in float32 at least, whatever the precision of the logits.

    Args:
        k: Average number of positives per image, the label included; in [1, L), fractions allowed.
        alpha: Weight of candidates and negatives relative to the labels.

    Reference:
        Garcin et al., "A two-head loss function for deep Average-K classification", section 5.

    Inputs:
        - outputs: `.logits` and `.sccp_logits`, both (B, L)
        - labels: (B,), each in [0, L)
        - index: not used

    Relation to the other losses:
        - K = 1 has no candidates: CE on one head and AN with weight `alpha` for the negatives on the other.
        - `CrossEntropyLoss` is the first term alone, on the only head.

    Example:
        >>> from avgk_hf.modeling import AvgKOutput
        >>> loss = AvgKLoss(k=2, alpha=0.3)
        >>> outputs = AvgKOutput(logits=torch.zeros(4, 10), sccp_logits=torch.zeros(4, 10))
        >>> round(loss(outputs, torch.tensor([0, 3, 3, 9])).item(), 4)  # log 10 + (1 + 0.3 + 0.3) log 2
        3.4116
    """

    def __init__(self, k: float, alpha: float = 1.0) -> None:
        super().__init__()
        if not k >= 1:
            raise ValueError(f"k={k!r} must be at least 1: the label itself is in every set.")
        if not alpha >= 0:
            raise ValueError(f"alpha={alpha!r} must be at least 0, e.g. 1.0.")
        self.k = k
        self.alpha = alpha

    def forward(self, outputs: Any, labels: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the scalar loss."""
        if outputs.sccp_logits is None:
            raise ValueError("the AVG-K loss needs `sccp_logits`: build the model with `objective='avgk'`.")
        check_labels(labels, outputs.logits)
        batch, num_labels = outputs.logits.shape
        if self.k >= num_labels:
            raise ValueError(f"k={self.k} must lie in [1, {num_labels}) for {num_labels} classes.")
        num_candidates = round((self.k - 1) * batch)
        return _AvgK.apply(widen(outputs.logits), widen(outputs.sccp_logits), labels, num_candidates, self.alpha)


def choose_candidates(log_probabilities: Tensor, labels: Tensor, num_candidates: int) -> Tensor:
    """Positions (M,) in the flattened batch of the M largest entries that are not true labels.

    Args:
        log_probabilities: log softmax of the SCCP head, (B, L). The logarithm keeps apart what underflows to 0.
        labels: (B,).
        num_candidates: M.
    """
    ranking = log_probabilities.scatter(1, labels[:, None], -torch.inf)
    return ranking.view(-1).topk(num_candidates, sorted=False).indices


class _AvgK(torch.autograd.Function):
    """Loss and gradient in one place, because autograd through masks would hold eleven (B, L) matrices."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, sccp_logits: Tensor, labels: Tensor, num_candidates: int, alpha: float
    ) -> Tensor:
        batch, num_labels = logits.shape
        log_probabilities = sccp_logits.log_softmax(1)  # (B, L)
        cross_entropy = -log_probabilities.gather(1, labels[:, None]).mean()

        own = torch.arange(batch, device=labels.device) * num_labels + labels  # (B,) positions in the flat batch
        candidates = choose_candidates(log_probabilities, labels, num_candidates)  # (M,)
        num_negatives = logits.numel() - batch - num_candidates
        positives = torch.cat([own, candidates])  # (B + M,)
        weights = logits.new_full((len(positives),), alpha / max(num_candidates, 1))
        weights[:batch] = 1 / batch
        negative_weight = alpha / max(num_negatives, 1)

        flat = logits.reshape(-1)
        positive_logits = flat[positives]
        negative_terms = F.softplus(flat)  # (B L,), -log(1 - sigma)
        negative_terms[positives] = 0
        loss = cross_entropy + negative_weight * negative_terms.sum() + weights @ F.softplus(-positive_logits)
        ctx.save_for_backward(logits, log_probabilities, labels, positives, weights)
        ctx.negative_weight = negative_weight
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_probabilities, labels, positives, weights = ctx.saved_tensors
        grad_sccp = log_probabilities.exp()
        grad_sccp.scatter_add_(1, labels[:, None], grad_sccp.new_full((len(labels), 1), -1.0))
        grad_sccp.mul_(grad_output / len(labels))

        grad = logits.reshape(-1).sigmoid().mul_(ctx.negative_weight)
        # overwritten rather than corrected, so that nothing cancels
        grad[positives] = -weights * torch.sigmoid(-logits.reshape(-1)[positives])
        return grad.view_as(logits).mul_(grad_output), grad_sccp, None, None, None
