"""What every loss does before its formula: refuse bad labels, and widen half precision."""

import torch
from torch import Tensor


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Refuse labels that are not one class id in [0, L) per image.

    On an accelerator the range is asserted asynchronously, so that no step waits for it.

    Args:
        labels: (B,).
        logits: (B, L).
    """
    batch, num_labels = logits.shape
    if labels.shape != (batch,) or labels.dtype.is_floating_point:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and type {labels.dtype} for {batch} images: expected one class id"
            " per image. Mixed labels (mixup, cutmix) do not fit this loss; switch them off."
        )
    inside = ((labels >= 0) & (labels < num_labels)).all()
    message = f"a label lies outside [0, {num_labels}), the {num_labels} classes of the model"
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(inside, message)
    elif not inside:
        wrong = labels[(labels < 0) | (labels >= num_labels)][0].item()
        raise ValueError(f"{message}: {wrong}. Check the label column, or build the model with more classes.")


def widen(logits: Tensor) -> Tensor:
    """Logits in float32, or as they are if already float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
