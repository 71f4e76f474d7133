"""The AVG-K loss of the paper: a softmax head proposes candidate classes, a multi-label head is trained on them."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..sets import check_k
from .labels import check_labels, check_weight, widen


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
        self.k = check_k(k)
        self.alpha = check_weight("alpha", alpha)

    def forward(self, outputs: Any, labels: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the scalar loss."""
        if outputs.sccp_logits is None:
            raise ValueError("the AVG-K loss needs `sccp_logits`: build the model with `objective='avgk'`.")
        check_labels(labels, outputs.logits)
        batch, num_labels = outputs.logits.shape
        if self.k >= num_labels:
            raise ValueError(f"k={self.k} must lie in [1, {num_labels}) for {num_labels} classes.")
        if outputs.sccp_logits.shape != outputs.logits.shape:
            raise ValueError(
                f"sccp_logits of shape {tuple(outputs.sccp_logits.shape)} beside logits of shape"
                f" {tuple(outputs.logits.shape)}: both heads score the same images and classes."
            )
        num_candidates = round((self.k - 1) * batch)
        return _AvgK.apply(widen(outputs.logits), widen(outputs.sccp_logits), labels, num_candidates, self.alpha)


def choose_candidates(log_probabilities: Tensor, labels: Tensor, num_candidates: int) -> Tensor:
    """Positions (M,) in the flattened batch of the M largest entries that are not true labels.

    Args:
        log_probabilities: log softmax of the SCCP head, (B, L). The logarithm keeps apart what underflows to 0. The
            entries of the labels are overwritten, to do without a copy.
        labels: (B,).
        num_candidates: M.
    """
    return largest(log_probabilities.scatter_(1, labels.unsqueeze(1), -torch.inf).view(-1), num_candidates)


def largest(values: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest of `values` (N,), in any order; exactly `count` of them, whatever ties."""
    size, depth = len(values), 16
    if size < 10_000 or count == 0 or values.device.type != "cpu" or torch.compiler.is_compiling():
        return values.topk(count, sorted=False).indices
    # on a CPU this `topk` would take longer than the cross-entropy; numpy's selection does not
    array = values.numpy()
    if size < 2 * depth * count:
        return torch.from_numpy(np.argpartition(array, size - count)[size - count :])
    # the largest values lie in the groups with the largest maxima, so that few are left to look at
    groups = size // depth
    maxima = values[: depth * groups].view(depth, groups).amax(0).numpy()
    bound = np.partition(maxima, groups - count)[groups - count]
    best = np.flatnonzero(~(maxima < bound))  # not `>=`: NaN has to come through and show in the loss
    members = np.arange(0, depth * groups, groups)[:, None] + best  # (depth, >= count)
    positions = np.append(members, np.arange(depth * groups, size))  # with the last few, which are in no group
    kept = np.argpartition(array[positions], len(positions) - count)[len(positions) - count :]
    return torch.from_numpy(positions[kept])


class _AvgK(torch.autograd.Function):
    """Loss and gradient in one place, because autograd through masks would hold ten (B, L) matrices.

    What is saved for `backward` is not changed by it, so that it may run twice. For small batches the time goes into
    the number of operations, for large ones into passes over (B, L) matrices and into memory for new ones.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, sccp_logits: Tensor, labels: Tensor, num_candidates: int, alpha: float
    ) -> Tensor:
        batch, num_labels = logits.shape
        index = labels.unsqueeze(1)  # (B, 1)
        log_probabilities = sccp_logits.log_softmax(1)  # (B, L)
        own_terms = log_probabilities.gather(1, index)  # (B, 1)
        candidates = choose_candidates(log_probabilities, labels, num_candidates)  # (M,)
        # softmax minus one-hot, in place
        grad_sccp = log_probabilities.exp_().scatter_(1, index, own_terms.expm1())

        own = torch.arange(0, logits.numel(), num_labels, device=labels.device) + labels  # (B,), in the flat batch
        positives = torch.cat([own, candidates])  # (B + M,)
        weights = logits.new_full(positives.shape, alpha / max(num_candidates, 1))
        weights[:batch].fill_(1 / batch)
        negative_weight = alpha / max(logits.numel() - len(positives), 1)

        flat = logits.reshape(-1)
        positive_terms = F.logsigmoid(flat.index_select(0, positives))  # (B + M,)
        negative_terms = F.softplus(flat).index_fill_(0, positives, 0)  # (B L,), -log(1 - sigma)
        ctx.save_for_backward(flat, grad_sccp, positives, positive_terms.expm1().mul_(weights))
        ctx.negative_weight = negative_weight
        loss = negative_terms.sum().mul_(negative_weight)
        loss.sub_(weights.dot(positive_terms))  # not `@`, which autocast would round to half precision
        return loss.sub_(own_terms.sum(), alpha=1 / batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        flat, grad_sccp, positives, grad_positives = ctx.saved_tensors
        grad = flat.sigmoid().mul_(grad_output * ctx.negative_weight)
        grad.index_copy_(0, positives, grad_positives * grad_output)  # rather than corrected: nothing cancels
        return grad.view_as(grad_sccp), grad_sccp * (grad_output / len(grad_sccp)), None, None, None
