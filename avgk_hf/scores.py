"""From logits to the scores that are thresholded: of one head, of each, and their mean.

Like the model, this file travels with a saved model as remote code.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_choice

SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "logit": lambda logits: logits,
}
# logits whose score is the mean of those of two heads' logits, in float32
MEANS = {
    "softmax": lambda one, other: torch.logaddexp(one.log_softmax(-1), other.log_softmax(-1)) - math.log(2),
    "sigmoid": lambda one, other: (
        torch.logaddexp(F.logsigmoid(one), F.logsigmoid(other))
        - torch.logaddexp(F.logsigmoid(-one), F.logsigmoid(-other))
    ),
    "logit": lambda one, other: (one + other) / 2,
}
# logits whose score is the balanced score w p of other logits, from log w; for the softmax up to a factor of the image
BALANCED = {
    "softmax": lambda logits, log_w: logits + log_w,
    "sigmoid": lambda logits, log_w: (
        F.logsigmoid(logits)
        + log_w
        - torch.logaddexp(F.logsigmoid(-logits), F.logsigmoid(logits) + (-log_w.expm1()).log())
    ),
}
PROBABILITIES, SUM_TO_ONE = ("softmax", "sigmoid"), ("softmax",)  # what is known of some of them
HEADS = ("ml", "sccp", "mean")
VIEWS = ("none", "flip")  # of an image, besides itself, that count in its scores
NO_FLOAT64 = ("mps",)  # devices without double precision


class NotFinite(ValueError):
    """A loss, weights or logits that are NaN or infinite: the training has diverged."""


def wide(device: torch.device | str) -> torch.dtype:
    """The type of the most precise numbers that a device has."""
    return torch.float32 if torch.device(device).type in NO_FLOAT64 else torch.float64


def check_finite(logits: Tensor, first: int = 0) -> None:
    """Refuse logits (n, L) that are NaN or infinite, with the numbers of their images.

    One sum over the batch decides; the images are looked for only when it fails.

    Args:
        logits: Output of one head, (n, L).
        first: Number of the first image, for the message.

    Example:
        >>> check_finite(torch.tensor([[0.0, 1.0], [math.inf, 0.0]]), first=64)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        avgk_hf.scores.NotFinite: the logits of image(s) 65 are NaN or infinite: no set can be predicted from them. ...
    """
    if math.isfinite(logits.detach().sum().item()):
        return
    broken = (~logits.isfinite()).reshape(len(logits), -1).any(1).nonzero()[:, 0].tolist() if logits.ndim else [0]
    if not broken:  # finite logits whose sum overflows
        return
    numbers = ", ".join(str(first + row) for row in broken[:5]) + ", ..." * (len(broken) > 5)
    raise NotFinite(
        f"the logits of image(s) {numbers} are NaN or infinite: no set can be predicted from them. Look for NaN among"
        " the pixels; if there is none the training diverged, and a lower learning rate, or bf16 or float32 in place"
        " of float16, usually cures it."
    )


def score(logits: Tensor, kind: str = "softmax", first: int = 0, classes: list[int] | None = None) -> Tensor:
    """Turn logits (n, L) into the float32 scores (n, L) that are thresholded.

    Half-precision logits are widened *before* the softmax: probabilities rounded to bfloat16 tie so often that the
    mean set size leaves K. NaN and infinite logits are refused.

    Args:
        logits: Output of one head, (n, L).
        kind: `"softmax"`, `"sigmoid"` or `"logit"`.
        first: Number of the first image, for messages.
        classes: Those that sets are restricted to: the scores are what they are without the others, and -inf for them.

    Example:
        >>> score(torch.zeros(1, 4), classes=[0, 3])
        tensor([[0.5000,   -inf,   -inf, 0.5000]])
    """
    if kind not in SCORES:
        check_choice("score", kind, SCORES)
    check_finite(logits if classes is None else logits[:, classes], first)
    return restricted(logits.float(), kind, classes)


def restricted(logits: Tensor, kind: str, classes: list[int] | None) -> Tensor:
    """The scores (n, L) of logits (n, L) that are known to be finite; the arguments are those of `score`."""
    if classes is None:
        return SCORES[kind](logits)
    scores = torch.full_like(logits, -math.inf)
    scores[:, classes] = SCORES[kind](logits[:, classes])
    return scores


def head_logits(output: Any) -> tuple[Tensor, Tensor | None]:
    """The logits (n, L) of the ML head and of the SCCP head, or None, of a model's output: the only reader of both.

    `logits` are those of the head that answers, and where that is not the ML head its own are `ml_logits`. An output
    of a model with one head, of any class, has `logits` only.
    """
    found = output if isinstance(output, Mapping) else vars(output)
    own = found.get("ml_logits")
    return found.get("logits") if own is None else own, found.get("sccp_logits")


def answering_logits(
    logits: Tensor, sccp_logits: Tensor | None, head: str, kind: str, weights: Tensor | None = None
) -> Tensor:
    """Logits (n, L) whose score, as in `score`, is that of `head_scores`; the arguments are those of `all_scores`.

    With the weights (L,) of a balance they order classes as balanced scores do, and the sigmoid of them is these.
    """
    if head == "mean":
        logits = MEANS[kind](logits.float(), sccp_logits.float())
    elif head == "sccp":
        logits = sccp_logits
    return logits if weights is None else BALANCED[kind](logits.float(), weights.to(logits.device).log())


def view_logits(one: Tensor, other: Tensor, kind: str) -> Tensor:
    """Logits (n, L) whose score is the mean of those of two views of the same images, in float32.

    They have the size of those of the views, and are these where both views agree, so that losses can read them.

    Args:
        one: Logits of one head for one view, (n, L).
        other: Of the same head for the other.
        kind: As in `score`.

    Example:
        >>> logits = view_logits(torch.tensor([[2.0, 0.0]]), torch.tensor([[2.0, 0.0]]), "softmax")
        >>> torch.testing.assert_close(logits, torch.tensor([[2.0, 0.0]]))
    """
    one, other = one.float(), other.float()
    mean = MEANS[kind](one, other)
    if kind in SUM_TO_ONE:  # which says nothing of the size
        mean = mean + (one.logsumexp(-1, keepdim=True) + other.logsumexp(-1, keepdim=True)) / 2
    return mean


def head_scores(
    logits: Tensor,
    sccp_logits: Tensor | None,
    head: str = "ml",
    kind: str = "softmax",
    classes: list[int] | None = None,
) -> Tensor:
    """The scores (n, L) of one head, or the mean of both heads' scores; the arguments are those of `all_scores`."""
    if head not in HEADS:
        check_choice("head", head, HEADS)
    if head != "ml" and sccp_logits is None:
        raise ValueError(f"head={head!r} needs the SCCP head, and this model has none: use `head='ml'`.")
    if head == "mean":
        return all_scores(logits, sccp_logits, kind, classes=classes)["mean"]
    return score(logits if head == "ml" else sccp_logits, kind, classes=classes)


def all_scores(
    logits: Tensor,
    sccp_logits: Tensor | None,
    kind: str = "softmax",
    first: int = 0,
    classes: list[int] | None = None,
) -> dict[str, Tensor]:
    """The scores (n, L) of every head that the model has, and the mean of both.

    Args:
        logits: Output of the ML head, (n, L).
        sccp_logits: Output of the SCCP head, (n, L), or None where the model has none.
        kind: As in `score`.
        first: As in `score`.
        classes: As in `score`.
    """
    scores = {"ml": score(logits, kind, first, classes)}
    if sccp_logits is not None:
        scores["sccp"] = score(sccp_logits, kind, first, classes)
        scores["mean"] = (scores["ml"] + scores["sccp"]) / 2
    return scores


def smoothed_prevalence(counts: Iterable[float]) -> list[float]:
    """The prevalence pi (L,) of classes with these numbers of images: (n_j + 1) / (n + L), so that none is 0.

    >>> smoothed_prevalence([6, 1, 0])
    [0.7, 0.2, 0.1]
    """
    counts = np.asarray(list(counts), float)
    return ((counts + 1) / (counts.sum() + len(counts))).tolist()


def balance_weights(prevalence: Iterable[float], balance: float) -> Tensor:
    """The weights w (L,) of a balance b: what is thresholded is the balanced score w_j p_j.

        w_j = (pi_min / pi_j)^b,    pi_j the prevalence of class j, b in [0, 1],

    is 1 / pi_j^b up to a factor that the threshold takes in, so that balanced probabilities stay in [0, 1]. Balance 0
    leaves scores as they are and makes the share of all images best; p / pi, with balance 1, makes the mean over
    classes best. In float32, as the scores are, so that torch, numpy and ONNX give the same.

    Example:
        >>> balance_weights([0.64, 0.32, 0.04], 0.5)
        tensor([0.2500, 0.3536, 1.0000])
    """
    prevalence = np.asarray(list(prevalence), float)
    return torch.from_numpy(((prevalence.min() / prevalence) ** balance).astype(np.float32))


def normalised(scores: Any) -> Any:
    """Balanced scores (n, L) as scores that sum to 1 in every image, for rules by sums; a tensor or an array.

    >>> normalised(torch.tensor([[0.25, 0.25, -math.inf]]))
    tensor([[0.5000, 0.5000,   -inf]])
    """
    known = scores.clip(0)  # what is left out has -inf
    if isinstance(scores, Tensor):
        return scores / known.to(wide(scores.device)).sum(-1, keepdim=True).float()
    return scores / known.sum(-1, keepdims=True, dtype=np.float64).astype(np.float32)
