"""What every loss does before its formula: refuse bad labels, and widen half precision."""

import torch
from torch import Tensor


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Refuse labels that are not one class id in [0, L) per image, and logits that are no (B, L) matrix.

    NaN and infinite logits pass: they show in the loss, and mixed precision in float16 relies on seeing them there.

    On an accelerator the range is asserted asynchronously, so that no step waits for it.

    Args:
        labels: (B,).
        logits: (B, L).
    """
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point() or 0 in logits.shape:
        found = f"shape {tuple(logits.shape)} and type {logits.dtype}" if isinstance(logits, Tensor) else type(logits)
        raise ValueError(f"logits of {found}: expected a floating point tensor (images, classes), neither of them 0.")
    batch, num_labels = logits.shape
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels of type {type(labels).__name__}: expected a tensor, e.g. `torch.tensor(labels)`.")
    if labels.dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool):
        raise ValueError(f"labels of type {labels.dtype}: expected int64, e.g. `labels.long()`.")
    if labels.shape != (batch,) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and type {labels.dtype} for {batch} images: expected one class id"
            " per image. Mixed labels (mixup, cutmix) do not fit this loss; switch them off."
        )
    lowest, highest = labels.aminmax()
    message = f"a label lies outside [0, {num_labels}), the {num_labels} classes of the model"
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async((lowest >= 0) & (highest < num_labels), message)
    elif lowest.item() < 0 or highest.item() >= num_labels:
        wrong = labels[(labels < 0) | (labels >= num_labels)][0].item()
        raise ValueError(f"{message}: {wrong}. Check the label column, or build the model with more classes.")


def widen(logits: Tensor) -> Tensor:
    """Logits in float32, or as they are if already float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
