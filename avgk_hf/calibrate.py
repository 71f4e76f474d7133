"""Compute the thresholds of a saved model on a dataset, or evaluate it with those it has."""

import tempfile
from collections.abc import Iterable

from datasets import Dataset

from .data import prepare
from .modeling import AvgKForImageClassification
from .trainer import AvgKTrainer
from .training_args import AvgKTrainingArguments


def evaluate(
    model: AvgKForImageClassification,
    dataset: Dataset,
    k: Iterable[float] = (),
    calibrate: bool = False,
    batch_size: int = 64,
    num_workers: int = 0,
    dataset_name: str | None = None,
) -> dict[str, float]:
    """Evaluate a model on one split of `load_splits`, in one streaming pass.

    Args:
        model: The model; with `calibrate` its config receives the thresholds.
        dataset: The split.
        k: Average set sizes besides the model's own; default: all that are calibrated.
        calibrate: Compute the thresholds from this split, instead of using those in the config.
        batch_size: Images per forward pass.
        num_workers: Processes that read images.
        dataset_name: For the calibration record.

    Returns:
        The metrics, as `AvgKTrainer.evaluate` names them, without prefix.
    """
    ks = list(k) or [float(key) for key in model.config.thresholds]
    if not calibrate:
        for size in ks:
            model.config.threshold(size)  # refuses one that is not calibrated
    with tempfile.TemporaryDirectory() as folder:
        args = AvgKTrainingArguments(
            output_dir=folder,
            calibrate_k=ks,
            per_device_eval_batch_size=batch_size,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=False,
            report_to="none",
        )
        trainer = AvgKTrainer(
            model=model, args=args, eval_dataset=prepare(dataset, model.config), dataset_name=dataset_name
        )
        metrics = trainer.evaluate(calibrate=calibrate)
    return {name.removeprefix("eval_"): value for name, value in metrics.items()}
