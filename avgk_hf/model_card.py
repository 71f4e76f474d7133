"""The model card: what the model returns, how to call it, and how well it does."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .configuration import AvgKConfig
from .sets import k_key

TEMPLATE = Path(__file__).with_name("model_card_template.md")
METHODS = {
    "ce": "Trained with cross-entropy; its scores are thresholded.",
    "avgk": "Trained with the AVG-K loss: a softmax head proposes candidate classes over the whole batch, and a"
    " multi-label head, whose scores are thresholded, is trained on them.",
    "an": "Trained with the assume-negative loss (AN): binary cross-entropy with the label as the only positive.",
    "epr": "Trained with expected positive regularisation (EPR): the label is positive, and K positives are expected.",
    "role": "Trained with ROLE: labels that were not observed are estimated for every training image.",
    "topk": "Trained with the balanced noised top-K hinge loss.",
}
HYPERPARAMETERS = {"avgk": ["alpha"], "epr": ["beta"], "role": ["role_lambda", "theta_lr"], "topk": ["epsilon"]}


def write_model_card(folder: Path, config: AvgKConfig, results: dict[str, Any], args: Any) -> None:
    """Write README.md into the folder of a trained model.

    Args:
        folder: The run.
        config: The model's config, calibrated.
        results: As in results.json.
        args: The training arguments.
    """
    split = "test" if "test" in results else "validation"
    metrics = results[split]
    rows = [_row(k, "" if k == k_key(config.k) else f"@{k}", metrics) for k in sorted(config.thresholds, key=float)]
    card_data = ModelCardData(
        library_name="avgk_hf",
        pipeline_tag="image-classification",
        tags=["timm", "average-k", "set-valued-classification"],
        model_name=folder.name,
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=results["dataset"],
                dataset_name=results["dataset"],
                dataset_split=split,
                metric_type=metric,
                metric_name=name,
                metric_value=round(metrics[metric], 4),
            )
            for metric, name in (
                ("average_k_accuracy", f"average-{k_key(config.k)} accuracy"),
                ("mean_set_size", "mean set size"),
                ("top1_accuracy", "top-1 accuracy"),
            )
        ],
    )
    card = ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        model_name=folder.name,
        k=k_key(config.k),
        ks=", ".join(sorted(config.thresholds, key=float)),
        num_labels=config.num_labels,
        results_split=split,
        rows=rows,
        top1=_percent(metrics["top1_accuracy"]),
        calibration=config.calibration,
        method=METHODS[config.objective],
        hyperparameters={
            "backbone": config.architecture,
            "objective": config.objective,
            "k": k_key(config.k),
            **{name: getattr(config, name) for name in HYPERPARAMETERS.get(config.objective, ())},
            "score / head": f"{config.score} / {config.head}",
            "epochs": args.num_train_epochs,
            "batch size": args.train_batch_size,
            "optimizer": getattr(args.optim, "value", args.optim),
            "learning rate": args.learning_rate,
            "weight decay": args.weight_decay,
            "seed": args.seed,
        },
    )
    card.save(folder / "README.md")


def _row(k: str, suffix: str, metrics: dict[str, float]) -> dict[str, str]:
    def percent(name: str) -> str:
        return _percent(metrics[name + suffix]) if name + suffix in metrics else "–"

    return {
        "k": k,
        "accuracy": percent("average_k_accuracy"),
        "size": f"{metrics['mean_set_size' + suffix]:.2f}",
        "empty": percent("empty_sets"),
        "lambda_val": f"{metrics['lambda_val' + suffix]:.6f}",
        **{name: percent(f"{name}_shot_accuracy") for name in ("few", "medium", "many")},
    }


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"
