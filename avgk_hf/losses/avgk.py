"""The AVG-K loss of the paper: a softmax head proposes candidate classes, a multi-label head is trained on them."""

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..processes import gather, rank, world_size
from .base import Hyperparameter, Loss


class AvgKLoss(Loss):
    r"""AVG-K: cross-entropy on the SCCP head plus binary cross-entropy on the ML head with pseudo-labels (section 5).

    For logits Z (ML) and Z' (SCCP), both (B, L), and labels y (B,):

    .. math::
        \ell = CE(Z', y) - \frac{1}{B} \sum_i \log \sigma(z_{i y_i})
               - \frac{\alpha}{M} \sum_{(i,j) \in C} \log \sigma(z_{ij})
               - \frac{\alpha}{N} \sum_{(i,j) \notin C, j \neq y_i} \log(1 - \sigma(z_{ij}))

    where the candidates C are the M = round((K - 1) B) largest entries of softmax(Z') over the *whole batch*, the true
    labels left out, and N = B L - B - M the remaining entries. No gradient flows through the choice. An empty group
    contributes 0. Ties at the cut go to the first image and the first class.

    With W processes and `candidate_scope="global"` the batch is that of all of them, W B images: the candidates, and
    the gradient once it is averaged over the processes, are those of one process with W B images. Each process sends
    its min(M, B (L - 1)) best scores and nothing else. All processes need batches of one size, which accelerate sees
    to. `"local"` chooses for each process by itself, without communication, as evaluation always does. Gradient
    accumulation does not enlarge the batch of the choice: every step of it chooses among its own images.

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

    sentence = (
        "Trained with the AVG-K loss: a softmax head proposes candidate classes over the whole batch, and a"
        " multi-label head is trained on them."
    )
    hyperparameters: ClassVar = {
        "alpha": Hyperparameter(1.0, "Weight of the pseudo-labels."),
        "candidate_scope": Hyperparameter("global", "Whose batch candidates come from.", choices=("global", "local")),
    }
    two_heads = True

    def compute(self, logits: Tensor, labels: Tensor, sccp_logits: Tensor) -> Tensor:
        # evaluation gives processes different numbers of batches, so that they cannot wait for each other there
        world = world_size() if self.candidate_scope == "global" and torch.is_grad_enabled() else 1
        num_candidates = round((self.k - 1) * world * len(labels))
        return _AvgK.apply(logits, sccp_logits, labels, num_candidates, self.alpha, world)


def choose_candidates(log_probabilities: Tensor, labels: Tensor, num_candidates: int) -> Tensor:
    """Positions (M,) in the flattened batch of the M largest entries that are not true labels, or of all if fewer.

    The log softmax (B, L) keeps apart what underflows to 0; its entries of the labels (B,) are overwritten, to do
    without a copy.
    """
    values = log_probabilities.scatter_(1, labels.unsqueeze(1), -torch.inf).view(-1)
    return largest(values, min(num_candidates, len(values) - len(labels)))


def choose_among_all(values: Tensor, num_candidates: int) -> Tensor:
    """Which of this process's best scores (m,), in the order of their positions, are among the M of all, (m,) bool."""
    everyone = gather(values)  # (W, m)
    chosen = torch.zeros(everyone.numel(), dtype=torch.bool, device=values.device)
    chosen[largest(everyone.view(-1), num_candidates)] = True
    return chosen.view_as(everyone)[rank()]


def largest(values: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest of `values` (N,), in any order; of equal values those that come first."""
    if values.device.type != "cpu" or torch.compiler.is_compiling() or count == 0:
        return values.sort(descending=True, stable=True).indices[:count]
    # on a CPU torch's selection would take longer than the cross-entropy; numpy's does not
    array = values.numpy()
    positions = _any_largest(array, count)
    found = array[positions]
    bound = found.min()
    num_tied = np.count_nonzero(found == bound)
    tied = np.flatnonzero(array == bound)
    if len(tied) > num_tied:
        positions = np.append(positions[found > bound], tied[:num_tied])
    return torch.from_numpy(positions)


def _any_largest(array: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` largest, with any of those that tie at the cut."""
    size, depth = len(array), 16
    if size < 10_000 or size < 2 * depth * count:
        return np.argpartition(array, size - count)[size - count :]
    # the largest values lie in the groups with the largest maxima, so that few are left to look at
    groups = size // depth
    maxima = array[: depth * groups].reshape(depth, groups).max(0)
    bound = np.partition(maxima, groups - count)[groups - count]
    best = np.flatnonzero(~(maxima < bound))  # not `>=`: NaN has to come through and show in the loss
    members = np.arange(0, depth * groups, groups)[:, None] + best  # (depth, >= count)
    positions = np.append(members, np.arange(depth * groups, size))  # with the last few, which are in no group
    kept = np.argpartition(array[positions], len(positions) - count)[len(positions) - count :]
    return positions[kept]


class _AvgK(torch.autograd.Function):
    """Loss and gradient in one place, because autograd through masks would hold ten (B, L) matrices.

    What is saved for `backward` is not changed by it, so that it may run twice. For small batches the time goes into
    the number of operations, for large ones into passes over (B, L) matrices and into memory for new ones.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, sccp_logits: Tensor, labels: Tensor, num_candidates: int, alpha: float, world: int
    ) -> Tensor:
        batch, num_labels = logits.shape
        index = labels.unsqueeze(1)  # (B, 1)
        log_probabilities = sccp_logits.log_softmax(1)  # (B, L)
        own_terms = log_probabilities.gather(1, index)  # (B, 1)
        candidates = choose_candidates(log_probabilities, labels, num_candidates)  # (M,)
        chosen = None
        if world > 1:
            candidates = candidates.sort().values
            chosen = choose_among_all(log_probabilities.view(-1)[candidates], num_candidates)  # (M,) bool
        # softmax minus one-hot, in place
        grad_sccp = log_probabilities.exp_().scatter_(1, index, own_terms.expm1())

        own = torch.arange(0, logits.numel(), num_labels, device=labels.device) + labels  # (B,), in the flat batch
        weights = logits.new_full((batch + len(candidates),), world * alpha / max(num_candidates, 1))
        weights[:batch].fill_(1 / batch)
        if chosen is not None:
            # what other processes outbid stands for the first label, without weight: shapes that depended on the
            # choice would make an accelerator wait
            candidates = candidates.where(chosen, own[0])
            weights[batch:] *= chosen
        positives = torch.cat([own, candidates])  # (B + M,)
        negative_weight = world * alpha / max(world * (logits.numel() - batch) - num_candidates, 1)

        flat = logits.reshape(-1)
        positive_terms = F.logsigmoid(flat.index_select(0, positives))  # (B + M,)
        negative_terms = F.softplus(flat).index_fill_(0, positives, 0)  # (B L,), -log(1 - sigma)
        grad_positives = positive_terms.expm1().mul_(weights)
        if chosen is not None:
            grad_positives[batch:] = grad_positives[batch:].where(chosen, grad_positives[0])
        ctx.save_for_backward(flat, grad_sccp, positives, grad_positives)
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
        return grad.view_as(grad_sccp), grad_sccp * (grad_output / len(grad_sccp)), None, None, None, None
