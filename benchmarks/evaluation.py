"""`AvgKTrainer.evaluate()`, which calibrates three heads and computes the loss, against a bare forward loop."""

import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

from avgk_hf import AvgKForImageClassification, AvgKTrainer, AvgKTrainingArguments

from .measure import MIB, Table, peak_rss_growth, progress, ratio, times


class Images(Dataset):
    """n labelled random images in memory, the same 64 over and over."""

    def __init__(self, num_examples: int, num_labels: int, image_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(64, 3, image_size, image_size, generator=generator)
        self.labels = torch.randint(0, num_labels, (num_examples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index % 64], "labels": self.labels[index]}


def make_trainer(backbone: str, num_examples: int, num_labels: int, image_size: int, folder: str) -> AvgKTrainer:
    """A trainer with a new two-head model; `folder` is where it may write."""
    torch.manual_seed(0)
    model = AvgKForImageClassification.from_timm(backbone, num_labels, k=5, image_size=image_size)
    args = AvgKTrainingArguments(
        output_dir=folder,
        per_device_eval_batch_size=32,
        calibrate_k=[1, 2, 3, 4],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        use_cpu=True,
    )
    return AvgKTrainer(model=model, args=args, eval_dataset=Images(num_examples, num_labels, image_size))


@torch.no_grad()
def forward_loop(trainer: AvgKTrainer) -> None:
    """The model on all batches of the same loader, and nothing else."""
    trainer.model.eval()
    for batch in trainer.get_eval_dataloader():
        trainer.model(batch["pixel_values"])


def evaluate_or_loop(num_examples: int, num_labels: int, evaluate: bool) -> Iterator[None]:
    """For `peak_rss_growth`: one pass over the images, after a short one that pays for lazy initialisation."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer("test_resnet", num_examples, num_labels, 32, folder)
        trainer.log = lambda *args, **kwargs: None
        forward_loop(trainer)
        trainer.evaluate(Images(64, num_labels, 32), calibrate=True)
        yield
        if evaluate:
            trainer.evaluate()
        else:
            forward_loop(trainer)
        yield


def run() -> Iterator[Table]:
    """Time, then memory."""
    backbone, num_examples, num_labels, image_size = "resnet18", 128, 1_081, 128
    progress(f"evaluate, {num_examples} images")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(backbone, num_examples, num_labels, image_size, folder)
        trainer.log = lambda *args, **kwargs: None  # it would print the metrics in between
        measured = times({"evaluate": trainer.evaluate, "loop": lambda: forward_loop(trainer)}, rounds=9)
    table = Table(
        "Time of evaluation",
        f"`AvgKTrainer.evaluate()` with lambda_val for K = 1, 2, 3, 4, 5 and three heads, the loss and all metrics,"
        f" against the forward passes alone over the same loader: {backbone}, {num_examples} images of"
        f" {image_size} x {image_size}, L = {num_labels}, batches of 32.",
    )
    table.add("times the forward passes", ratio(measured, "evaluate", "loop"), "<= 1.15")
    yield table

    num_examples, num_labels = 4_000, 5_000
    progress(f"memory of evaluate, {num_examples} x {num_labels}")
    bare, evaluating = (peak_rss_growth(evaluate_or_loop, num_examples, num_labels, flag) for flag in (False, True))
    matrix = 4 * num_examples * num_labels / MIB
    table = Table(
        "Memory of evaluation",
        "MiB by which the same `evaluate()`, here with a small backbone, raises the peak resident memory of a fresh"
        " process above that of the forward passes alone. What grew with n x L would exceed a quarter of the n x L x 4"
        " bytes that the logits of one head take.",
    )
    what = f"n = {num_examples}, L = {num_labels}, where the logits of one head are {matrix:.0f} MiB"
    table.add(what, (evaluating - bare) / MIB, f"<= {matrix / 4:.0f}")
    yield table
