"""The AVG-K loss against cross-entropy and against the formula written with masks."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from avgk_hf import AvgKOutput
from avgk_hf.losses import LOSSES

from .measure import Table, peak_tensor_bytes, progress, ratio, times

# B, L, K, at most this many times cross-entropy, at least this many times faster than masks
SHAPES = [
    (32, 1081, 5, 6, 1.2),
    (64, 100, 5, 5.5, 1.1),
    (128, 1000, 5, 5, 1.8),
    (512, 1000, 10, 5, 2.3),
    (256, 21841, 10, 3.3, 2.6),
]


def masked_avgk(logits: Tensor, sccp_logits: Tensor, labels: Tensor, k: float, alpha: float = 1.0) -> Tensor:
    """The same loss in the usual way: a mask for each group of classes, stable logarithms, and autograd."""
    batch, num_labels = logits.shape
    num_candidates = round((k - 1) * batch)
    is_label = F.one_hot(labels, num_labels).bool()  # (B, L)
    with torch.no_grad():
        ranking = sccp_logits.softmax(1).masked_fill(is_label, -1.0)
        chosen = ranking.flatten().topk(num_candidates, sorted=False).indices
        is_candidate = torch.zeros_like(is_label).flatten().scatter(0, chosen, True).view_as(is_label)
    is_negative = ~(is_label | is_candidate)
    positive_terms, negative_terms = F.logsigmoid(logits), F.logsigmoid(-logits)
    return (
        F.cross_entropy(sccp_logits, labels)
        - (positive_terms * is_label).sum() / batch
        - alpha * (positive_terms * is_candidate).sum() / num_candidates
        - alpha * (negative_terms * is_negative).sum() / (logits.numel() - batch - num_candidates)
    )


def implementations(batch: int, num_labels: int, k: float) -> dict[str, Callable[[], None]]:
    """Forward and backward of the three losses on the same logits."""
    generator = torch.Generator().manual_seed(0)
    logits, sccp_logits = (3 * torch.randn(batch, num_labels, generator=generator) for _ in range(2))
    labels = torch.randint(0, num_labels, (batch,), generator=generator)
    outputs = AvgKOutput(logits=logits.requires_grad_(), sccp_logits=sccp_logits.requires_grad_())
    avgk = LOSSES["avgk"](k=k)
    losses = {
        "cross-entropy": lambda: F.cross_entropy(sccp_logits, labels),
        "avgk": lambda: avgk(outputs, labels),
        "masks": lambda: masked_avgk(logits, sccp_logits, labels, k),
    }
    assert torch.allclose(losses["avgk"](), losses["masks"](), rtol=1e-5)

    def step(loss: Callable[[], Tensor]) -> None:
        logits.grad = sccp_logits.grad = None
        loss().backward()

    return {name: lambda loss=loss: step(loss) for name, loss in losses.items()}


def run() -> Iterator[Table]:
    """Time, then memory."""
    table = Table(
        "Time of the AVG-K loss",
        "Forward and backward on given logits, B x L, float32. Cross-entropy is `F.cross_entropy` on one of the two;"
        " masks is the same loss with a mask for each group of classes, `logsigmoid`, a flat `topk` and autograd.",
    )
    for batch, num_labels, k, slower, faster in SHAPES:
        progress(f"loss, {batch} x {num_labels}")
        measured = times(implementations(batch, num_labels, k), rounds=21)
        shape = f"B = {batch}, L = {num_labels}, K = {k}"
        table.add(f"{shape}: times cross-entropy", ratio(measured, "avgk", "cross-entropy"), f"<= {slower}")
        table.add(f"{shape}: times faster than masks", ratio(measured, "masks", "avgk"), f">= {faster}")
    yield table

    batch, num_labels, k, *_ = SHAPES[-1]
    progress(f"memory of the loss, {batch} x {num_labels}")
    table = Table(
        "Memory of the AVG-K loss",
        f"Peak memory of all tensors made in forward and backward, the gradients included, in units of one float32"
        f" matrix B x L, for B = {batch}, L = {num_labels}, K = {k}; from torch.profiler's record of allocations."
        " numpy's part in choosing the candidates is not in it: a few sixteenths of a matrix, long before the peak.",
    )
    for name in ("cross-entropy", "avgk", "masks"):
        function = implementations(batch, num_labels, k)[name]  # anew, so that no older gradient is freed in between
        matrices = peak_tensor_bytes(function) / (4 * batch * num_labels)
        table.add(name, matrices, "<= 4.2" if name == "avgk" else "")
    yield table
