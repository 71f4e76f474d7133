"""Training heads on cached features, against a plain loop over the same matrix."""

import tempfile
from collections.abc import Callable, Iterator

import torch
from datasets import ClassLabel, Dataset, Features
from torch import Tensor
from transformers import PrinterCallback

from avgk_hf import AvgKForImageClassification, AvgKTrainer, AvgKTrainingArguments
from avgk_hf.features import Features as Matrix
from avgk_hf.losses import make_loss
from avgk_hf.modeling import AvgKOutput

from .measure import Table, progress, ratio, times

IMAGES, CLASSES, BATCHES, EPOCHS, ROUNDS = 4800, 200, (64, 128, 256), 20, 3  # about those of CUB-200-2011
ARCHITECTURE = "tf_efficientnet_lite0"


def make_model() -> AvgKForImageClassification:
    """A model that nobody asks for its backbone."""
    torch.manual_seed(0)
    return AvgKForImageClassification.from_timm(ARCHITECTURE, num_labels=CLASSES, k=5).freeze_backbone()


def make_matrix(width: int) -> Matrix:
    """Random features of images that do not exist."""
    torch.manual_seed(0)
    labels = {"label": torch.randint(0, CLASSES, (IMAGES,)).tolist()}
    names = Features(label=ClassLabel(names=[str(i) for i in range(CLASSES)]))
    return Matrix(Dataset.from_dict(labels, features=names), torch.rand(IMAGES, width))


def train(matrix: Matrix, batch: int, folder: str) -> Callable[[], None]:
    """The trainer's way."""
    args = AvgKTrainingArguments(
        output_dir=folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=batch,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=0.1,
        lr_scheduler_type="cosine",
        max_grad_norm=0,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer = AvgKTrainer(model=make_model(), args=args, train_dataset=matrix)
    trainer.remove_callback(PrinterCallback)
    return trainer.train


def loop(matrix: Matrix, batch: int) -> Callable[[], None]:
    """The plain way: index the matrix, two linear layers, the loss, SGD."""
    model = make_model()
    heads = torch.nn.ModuleList([model.ml_head, model.sccp_head])
    criterion = make_loss(model.config)
    optimizer = torch.optim.SGD(heads.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * IMAGES // batch)

    def step(rows: Tensor) -> None:
        features, labels = matrix.features[rows], matrix.labels[rows]
        output = AvgKOutput(logits=heads[0](features), sccp_logits=heads[1](features))
        criterion(output, labels, rows).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    def epochs() -> None:
        for _ in range(EPOCHS):
            for rows in torch.randperm(IMAGES).split(batch):
                step(rows)

    return epochs


def run() -> Iterator[Table]:
    """The ratio of both."""
    progress("training heads on features")
    matrix = make_matrix(make_model().ml_head.in_features)
    note = (
        f"{IMAGES} rows of features, {CLASSES} classes, {EPOCHS} epochs with AVG-K and SGD:"
        " `train()` of the Trainer on cached features, and a loop that indexes the matrix, with the same loss and"
        " optimizer."
    )
    table = Table("Time of training heads on cached features", note)
    for batch in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            ways = {"trainer": train(matrix, batch, folder), "loop": loop(matrix, batch)}
            measured = times(ways, ROUNDS)
        table.add(f"batches of {batch}: times a plain loop", ratio(measured, "trainer", "loop"), "<= 1.3")
    yield table
