"""The model card: what the model returns, how to call it, and how well it does."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import TrainerCallback

from .configuration import AvgKConfig, read_json
from .conformal import describe
from .losses import LOSSES
from .modeling import check_folder
from .sets import HEADS, k_key

TEMPLATE = Path(__file__).with_name("model_card_template.md")
SHOWN = ("num_examples", "dataset", "split", "date", "step")  # of a calibration's record
CALIBRATED = "This model was not trained for sets: a classifier that existed already was calibrated with avgk_hf."


class CardCallback(TrainerCallback):
    """Collects for the card what the trainer evaluates."""

    def __init__(self) -> None:
        self._validation: dict[int, dict[str, float]] = {}  # by training step
        self._others: dict[str, dict[str, float]] = {}  # by prefix, e.g. test

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over the evaluations before the checkpoint that training goes on from."""
        for entry in state.log_history:
            if "eval_average_k_accuracy" in entry:
                self._validation[entry["step"]] = plain_metrics(entry, "eval_")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Keep the metrics of one evaluation."""
        prefix = next(name for name in metrics if name.endswith("_average_k_accuracy")).split("_")[0]
        if prefix == "eval":
            self._validation[state.global_step] = plain_metrics(metrics, "eval_")
        else:
            self._others[prefix] = plain_metrics(metrics, f"{prefix}_")

    def results(self, config: AvgKConfig) -> dict[str, dict[str, float]]:
        """Metrics by split; on validation those of the weights that the thresholds belong to."""
        step = (config.calibration or {}).get("step")
        validation = {"validation": self._validation[step]} if step in self._validation else {}
        return {**validation, **self._others}


def plain_metrics(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """Metrics without their prefix and without timings, which are not results."""
    noise = ("runtime", "per_second", "preparation_time", "epoch", "step")
    return {name.removeprefix(prefix): value for name, value in metrics.items() if not name.endswith(noise)}


def hyperparameters(config: AvgKConfig, args: Any) -> dict[str, Any]:
    """What the training table of the card shows, from the model's config and the training arguments."""
    return {
        "backbone": config.architecture,
        "objective": config.objective,
        "k": k_key(config.k),
        **config.hyperparameters,
        "score / head": f"{config.score} / {config.head}",
        "epochs": args.num_train_epochs,
        "batch size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "optimizer": getattr(args.optim, "value", args.optim),
        "learning rate": args.learning_rate,
        "weight decay": args.weight_decay,
        "seed": args.seed,
    }


def render_card(
    repo: str,
    config: AvgKConfig,
    results: dict[str, Any],
    hyperparameters: dict[str, Any],
    dataset: str | None = None,
    set_sizes: list[int] | None = None,
    calibrated_only: bool = False,
) -> ModelCard:
    """The model card of a trained model.

    Args:
        repo: Name of the model, as users load it.
        config: The model's config, calibrated.
        results: Metrics by split, e.g. `{"test": {"average_k_accuracy": 0.97, ...}}`.
        hyperparameters: Rows of the training table.
        dataset: Name of the data.
        set_sizes: How many test images got a set of 0, 1, 2, ... classes.
        calibrated_only: Whether the model was trained elsewhere, and only its thresholds come from here.
    """
    own_k = k_key(config.k) if hasattr(config, "k") else min(config.thresholds, key=float)
    split = "test" if "test" in results else "validation"
    metrics = results.get(split, {})
    ks = sorted(config.thresholds, key=float)
    suffixes = {k: f"@{k}" if f"mean_set_size@{k}" in metrics or k != own_k else "" for k in ks}
    # a K that was calibrated after the evaluation has no results
    rows = [_row(k, suffix, metrics) for k, suffix in suffixes.items() if f"mean_set_size{suffix}" in metrics]
    record = config.calibration or {}
    head = record.get("head")
    total = sum(set_sizes or [])
    shares = [(size, f"{100 * count / total:.1f}%") for size, count in enumerate(set_sizes or []) if count]
    card_data = ModelCardData(
        library_name="transformers",
        pipeline_tag="image-classification",
        tags=["avgk_hf", "timm", "average-k", "set-valued-classification"],
        model_name=repo.split("/")[-1],
        eval_results=_eval_results(config, metrics, split, dataset) or None,
    )
    return ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        model_name=as_markdown(repo.split("/")[-1]),
        repo=json.dumps(repo, ensure_ascii=not repo.isprintable()),
        shell_repo=shlex.quote(repo) if repo.isprintable() and "`" not in repo else "MODEL",
        k=as_markdown(own_k),
        ks=as_markdown(", ".join(ks)),
        num_labels=config.num_labels,
        results_split=split,
        rows=rows,
        sizes=shares[:20],
        top1=_percent(metrics["top1_accuracy"]) if metrics else "",
        calibration={name: as_markdown(record[name]) for name in SHOWN if record.get(name)},
        method=CALIBRATED if calibrated_only else LOSSES[config.objective].sentence,
        dataset=as_markdown(dataset or "not stated"),
        hyperparameters={as_markdown(name): as_markdown(value) for name, value in hyperparameters.items()},
        curve=_curve(record.get("curve")),
        curve_head=head if getattr(config, "head", "ml") == "auto" and head in HEADS else None,
        levels=_levels(getattr(config, "coverage", None) or {}, metrics),
        measured=any(name.startswith("coverage_") for name in metrics),
    )


def card_of_run(folder: str | Path, repo: str | None = None) -> ModelCard:
    """The card of a finished `avgk train`, from its config.json and results.json.

    Args:
        folder: The run.
        repo: Name of the model, as users load it; default: the folder's name.
    """
    folder = Path(folder)
    if not (folder / "results.json").is_file():
        raise FileNotFoundError(f"{folder} holds no results.json; name the folder of a finished `avgk train`.")
    check_folder(folder, weights=False)
    results = read_results(folder)
    rows, dataset = results["hyperparameters"], results["dataset"]
    metrics = {split: results[split] for split in ("validation", "test") if split in results}
    sizes = results.get("set_sizes", {}).get("all")
    config = AvgKConfig.from_pretrained(folder)
    return render_card(repo or folder.name, config, metrics, rows, dataset, sizes)


def read_results(folder: Path, *further: str) -> dict[str, Any]:
    """What `avgk train` wrote to results.json; a damaged one is refused with the name of the file and the field."""
    results = read_json(folder / "results.json")
    for name in ("dataset", "hyperparameters", "validation", *further):
        if name not in results:
            raise ValueError(f"{folder / 'results.json'} has no field {name!r}; write it anew with `avgk train`.")
        if name != "dataset" and not isinstance(results[name], dict):
            raise ValueError(
                f"{folder / 'results.json'}: the field {name!r} must be a mapping, not {results[name]!r}."
            )
    for split in ("validation", "test"):
        for name, value in results.get(split, {}).items():
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"{folder / 'results.json'}: {split}.{name}={value!r} must be a number.")
    return results


def _eval_results(config: AvgKConfig, metrics: dict[str, float], split: str, dataset: str | None) -> list[EvalResult]:
    """The results as the Hub's model-index takes them: accuracy and size for every K, and top-1."""
    wanted = []
    for k in sorted(config.thresholds, key=float):
        own = hasattr(config, "k") and k == k_key(config.k)
        suffix = "" if own and f"mean_set_size@{k}" not in metrics else f"@{k}"
        wanted += [
            ("average_k_accuracy", suffix, f"average-{k} accuracy"),
            ("mean_set_size", suffix, f"mean set size for K = {k}"),
        ]
    wanted.append(("top1_accuracy", "", "top-1 accuracy"))
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=dataset or "unknown",
            dataset_name=dataset or "unknown",
            dataset_split=split,
            metric_type=metric,
            metric_name=name,
            metric_value=round(metrics[metric + suffix], 4),
        )
        for metric, suffix, name in wanted
        if metric + suffix in metrics
    ]


def _row(k: str, suffix: str, metrics: dict[str, float]) -> dict[str, str]:
    def percent(name: str) -> str:
        return _percent(metrics[name + suffix]) if name + suffix in metrics else "–"

    return {
        "k": as_markdown(k),
        "accuracy": percent("average_k_accuracy"),
        "size": f"{metrics['mean_set_size' + suffix]:.2f}",
        "empty": percent("empty_sets"),
        "lambda_val": f"{metrics['lambda_val' + suffix]:.6f}",
        **{name: percent(f"{name}_shot_accuracy") for name in ("few", "medium", "many")},
    }


def _curve(rows: list[list[float]] | None) -> list[dict[str, str]]:
    """The trade-off curve of a calibration, as text."""
    return [
        {
            "k": f"{k:g}",
            "size": f"{size:.2f}",
            "coverage": _percent(coverage),
            "topk": _percent(topk),
            "lambda_val": f"{lambda_val:.6f}",
        }
        for k, lambda_val, size, coverage, topk in rows or []
    ]


def _levels(record: dict[str, Any], metrics: dict[str, float]) -> list[dict[str, str]]:
    """The coverage levels that can be asked for, and what was reached, by whichever methods were measured."""
    rows = []
    for level, methods in describe(record).items():
        names = {"lac": level, **{how: f"{how}_{level}" for how in ("aps", "raps", "per_class")}}
        found = {how: name for how, name in names.items() if f"coverage_{name}" in metrics}
        rows.append(
            {
                "asked": as_markdown(level),
                "methods": as_markdown(methods),
                "coverage": ", ".join(
                    f"{_percent(metrics[f'coverage_{name}'])} ({how.replace('_', ' ')})" for how, name in found.items()
                )
                or "–",
                "size": ", ".join(f"{metrics[f'coverage_{name}_size']:.2f}" for name in found.values()) or "–",
            }
        )
    return rows


def as_markdown(value: Any) -> str:
    r"""A value that stays text in Markdown, on its line and in its cell, whatever a name holds.

    >>> print(as_markdown("oak | *elm*\n# ash_1"))
    oak \| \*elm\* \# ash_1
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    line = re.sub(r"([\\`*<>|\[\]#~&$@]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", line)
    # addresses would become links by themselves
    return re.sub(r"(?i):/(?=/)|www(?=\.)", r"\g<0>\\", line)


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"
