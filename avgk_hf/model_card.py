"""The model card: what the model returns, how to call it, and how well it does."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel, TimmWrapperConfig, TrainerCallback

from .calibration import Calibration
from .checks import is_hub_id, read_json
from .classifiers import carry_code, image_processor, write_thresholds
from .configuration import AvgKConfig
from .conformal import METHODS, describe_coverage, question_name
from .evaluation import Evaluation
from .files import new_file, replacing
from .hub import HERE
from .losses import LOSSES
from .results import CALIBRATED_ONLY, of_other_thresholds, read_results
from .scope import promise
from .sets import k_key
from .weights import check_folder, without_bars

TEMPLATE = Path(__file__).with_name("model_card_template.md")
CALIBRATED = "This model was not trained for sets: a classifier that existed already was calibrated with avgk_hf."
FREQUENCIES = {
    "train": "those of the training images",
    "given": "given when the model was calibrated",
    "estimated": "estimated, as the mean probability of each class on the images of the calibration",
}
MOST_CLASSES = 10_000  # in the table
# what the Hub calls licenses that timm's weights have; any other goes there by its name
LICENSES = "apache-2.0 mit bsd-3-clause cc-by-4.0 cc-by-sa-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 cc0-1.0 gemma".split()
# what is shown for each K: the metric, its heading, how it is written, and what the Hub's model-index calls it
COLUMNS = (
    ("average_k_accuracy", "average-K accuracy", "{:.2%}", "average-{} accuracy"),
    ("mean_set_size", "mean set size", "{:.2f}", "mean set size for K = {}"),
    ("empty_sets", "empty sets", "{:.2%}", None),
    ("few_shot_accuracy", "few shot", "{:.2%}", None),
    ("medium_shot_accuracy", "medium shot", "{:.2%}", None),
    ("many_shot_accuracy", "many shot", "{:.2%}", None),
    ("lambda_val", "lambda_val", "{:.6f}", None),
)


class CardCallback(TrainerCallback):
    """Keeps for the card what the trainer evaluates."""

    def __init__(self) -> None:
        self._validation: dict[int, dict[str, float]] = {}  # by training step
        self._others: dict[str, dict[str, float]] = {}  # by prefix, e.g. test
        self.set_sizes: dict[str, list[int]] = {}  # how many test images got a set of 0, 1, 2, ... classes, by shot

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over the evaluations before the checkpoint that training goes on from."""
        for entry in state.log_history:
            if "eval_average_k_accuracy" in entry:  # the first of a step is that of the training itself
                self._validation.setdefault(entry["step"], plain_metrics(entry, "eval_"))

    def record(self, prefix: str, metrics: dict[str, float], evaluation: Evaluation, step: int) -> None:
        """Keep the metrics of one evaluation: as those of validation only where it calibrated.

        Args:
            prefix: Before the names of the metrics.
            metrics: What was reported.
            evaluation: What was collected; of images without labels nothing is kept.
            step: Of the training.
        """
        if evaluation.calibrate:
            self._validation[step] = plain_metrics(metrics, f"{prefix}_")
        elif evaluation.labelled:
            self._others[prefix] = plain_metrics(metrics, f"{prefix}_")
            if prefix == "test":
                self.set_sizes = evaluation.size_counts()

    def results(self, config: AvgKConfig) -> dict[str, dict[str, float]]:
        """Metrics by split; on validation those of the weights that the thresholds belong to."""
        step = Calibration.of(config).source.get("step")
        validation = {"validation": self._validation[step]} if step in self._validation else {}
        return {**self._others, **validation}


def plain_metrics(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """Metrics without their prefix and without timings, which are not results."""
    noise = ("runtime", "per_second", "preparation_time", "epoch", "step")
    return {name.removeprefix(prefix): value for name, value in metrics.items() if not name.endswith(noise)}


def _calibrated(config: Any, metrics: dict[str, float]) -> dict[str, Any]:
    """What the card says about a model's calibration: all that it reads of one."""
    calibration, source = Calibration.of(config), ("num_examples", "dataset", "split", "date", "step")
    record = calibration.source
    return {
        "k": k_key(calibration.k),
        "ks": list(map(k_key, calibration.ks)),
        "calibration": {name: as_markdown(record[name]) for name in source if record.get(name)},
        "restricted": None if calibration.classes is None else len(calibration.classes),
        "heads": _heads(calibration) if getattr(config, "sccp_head", False) else {},
        "curve": calibration.curve,
        "balance": f"{calibration.balance:g}",
        "balances": [f"{balance:g}" for balance in calibration.balances],
        "frequencies": FREQUENCIES.get(record.get("prevalence_from"), "not known"),
        "tradeoff": calibration.tradeoff,
        "curve_head": calibration.source_head if getattr(config, "head", "ml") == "auto" else None,
        "levels": _levels(describe_coverage(calibration.coverage), metrics),
        "promise": (promise(calibration) or "").partition(" `")[0],
    }


def _heads(calibration: Calibration) -> dict[str, str]:
    """{head: the K that it answers for, as text}."""
    heads = {k: calibration.head(k) for k in calibration.ks}
    return {head: ", ".join(k_key(k) for k in heads if heads[k] == head) for head in dict.fromkeys(heads.values())}


def render_card(
    repo: str,
    config: AvgKConfig,
    results: dict[str, Any],
    hyperparameters: dict[str, Any],
    dataset: str | None = None,
    set_sizes: list[int] | None = None,
    calibrated_only: bool = False,
    adapter: bool = False,
) -> ModelCard:
    """The model card of a trained model.

    Args:
        repo: Name of the model, as users load it: a Hub id, or the name of its folder.
        config: The model's config, calibrated.
        results: Metrics by split, e.g. `{"test": {"average_k_accuracy": 0.97, ...}}`.
        hyperparameters: Rows of the training table.
        dataset: Name of the data; `user/name` is a dataset on the Hub.
        set_sizes: How many test images got a set of 0, 1, 2, ... classes.
        calibrated_only: Whether the model was trained elsewhere, and only its thresholds come from here.
        adapter: Whether the weights are an adapter of peft.
    """
    split = "test" if "test" in results else "validation"
    metrics, name, total = results.get(split, {}), repo.split("/")[-1], sum(set_sizes or [])
    calibrated = _calibrated(config, metrics)
    by_k = _by_k(metrics, calibrated["ks"], calibrated["k"])
    relation = None if calibrated_only else "adapter" if adapter else "finetune"
    evaluated = _eval_results(by_k, metrics, split, dataset) if is_hub_id(dataset) else []  # the Hub takes no others
    ours, classes = isinstance(config, AvgKConfig), _classes(config)
    return ModelCard.from_template(
        _card_data(repo, config, relation, dataset, evaluated, metrics=["accuracy"] if metrics else None),
        template_path=str(TEMPLATE),
        text=as_markdown,
        model_name=name,
        repo=_quoted(repo) + ("" if is_hub_id(repo) else HERE),
        ours=ours,
        adapter=adapter,
        label=_quoted(classes[0][0]),
        classes=classes[:MOST_CLASSES],
        counted=classes[0][1] is not None,
        num_labels=config.num_labels,
        results_split=split,
        columns=[column for column in COLUMNS if any(column[0] in found for found in by_k.values())],
        by_k=by_k,
        stale=of_other_thresholds(config, {split: metrics}),
        metrics=metrics,
        number=total if split == "test" else 0,
        sizes=[(size, f"{count / total:.1%}") for size, count in enumerate(set_sizes or []) if count][:20],
        method=LOSSES[config.objective].sentence if ours else CALIBRATED,
        dataset=None if calibrated_only else dataset or "not stated",
        hyperparameters=hyperparameters,
        **calibrated,
    )


def _card_data(
    repo: str, config: Any, relation: str | None, dataset: str | None, evaluated: list[EvalResult], **further: Any
) -> ModelCardData:
    """What the Hub finds a model by, as far as it is known; `relation` is that to the base model, None for none."""
    named = {"model_name": repo.split("/")[-1], "eval_results": evaluated} if evaluated else {}
    if relation and is_hub_id(dataset):
        named["datasets"] = [dataset]
    return ModelCardData(
        library_name="peft" if relation == "adapter" else "transformers",
        pipeline_tag="image-classification",
        tags=["avgk_hf", *["timm"] * hasattr(config, "architecture"), "average-k", "set-valued-classification"],
        **named,
        **further,
        **_origin(repo, config, relation),
    )


def _origin(repo: str, config: Any, relation: str | None) -> dict[str, str]:
    """Where the weights come from and their license, as far as the config knows, in the names of the Hub."""
    loaded = config.name_or_path
    base = loaded if is_hub_id(loaded) and not Path(loaded).exists() else getattr(config, "base_model", None)
    found = {} if base in (None, repo) else {"base_model": base}
    if found and relation:
        found["base_model_relation"] = relation
    described = (getattr(config, "pretrained_cfg", None) or {}) if found or relation else {}  # else of other weights
    license = described.get("license", "unknown")
    if license in LICENSES:
        found["license"] = license
    elif license not in (None, "unknown") and re.fullmatch("[a-z][a-z0-9.-]{1,60}", str(license)):
        found |= {"license": "other", "license_name": license}
    return found


def _classes(config: Any) -> list[tuple[str, int | None]]:
    """The name of each class, and its training images where they are known."""
    names = [str(name) for _, name in sorted(config.id2label.items())]
    counts = getattr(config, "train_counts", None) or []
    return list(zip(names, counts if len(counts) == len(names) else [None] * len(names), strict=True))


def _quoted(text: str) -> str:
    """A text as a string of Python on one line."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _by_k(metrics: dict[str, float], ks: list[str], own: str) -> dict[str, dict[str, float]]:
    """{K: metrics} of every K that was evaluated; the model's own may stand without its name behind it."""
    found = {}
    for k in ks:
        suffix = "" if k == own and f"mean_set_size@{k}" not in metrics else f"@{k}"
        if f"mean_set_size{suffix}" in metrics:
            found[k] = {name: metrics[name + suffix] for name, *_ in COLUMNS if name + suffix in metrics}
    return found


def _eval_results(
    by_k: dict[str, dict[str, float]], metrics: dict[str, float], split: str, dataset: str
) -> list[EvalResult]:
    """The results as the Hub's model-index takes them: accuracy and size for every K, and top-1."""
    named = [(name, called.format(k), found) for k, found in by_k.items() for name, *_, called in COLUMNS if called]
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split=split,
            metric_type="accuracy" if metric == "top1_accuracy" else metric,  # as the Hub calls it
            metric_name=name,
            metric_value=round(found[metric], 4),
        )
        for metric, name, found in [*named, ("top1_accuracy", "top-1 accuracy", metrics)]
        if metric in found
    ]


def _levels(levels: dict[str, str], metrics: dict[str, float]) -> list[dict[str, str]]:
    """The coverage levels that can be asked for, and what was reached, by whichever methods were measured."""
    rows = []
    for level, methods in levels.items():
        names = {method: f"coverage_{question_name(float(level), method)}" for method in METHODS}
        names["per class"] = f"coverage_{question_name(float(level), per_class=True)}"
        found = {how: name for how, name in names.items() if name in metrics}
        reached = ", ".join(f"{metrics[name]:.2%} ({how})" for how, name in found.items())
        sizes = ", ".join(f"{metrics[f'{name}_size']:.2f}" for name in found.values())
        rows.append({"asked": level, "methods": methods, "coverage": reached, "size": sizes})
    return rows


def card_of_run(folder: str | Path, repo: str | None = None) -> ModelCard:
    """The card of a finished `avgk train`, from its config.json and results.json.

    Args:
        folder: The run.
        repo: Name of the model, as users load it; default: the folder's name.
    """
    folder = Path(folder)
    if not (folder / "results.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no results.json; name the folder of a finished `avgk train` or `save_model()`"
            f"{f'; {CALIBRATED_ONLY}' if (folder / 'config.json').is_file() else ''}."
        )
    check_folder(folder, weights=False)
    found = read_results(folder)
    metrics = {split: found[split] for split in ("validation", "test") if split in found}
    sizes, config = found.get("set_sizes", {}).get("all"), AvgKConfig.from_pretrained(folder)
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        config.name_or_path = read_json(adapter).get("base_model_name_or_path") or ""
    about = (found["hyperparameters"], found["dataset"], sizes)
    return render_card(repo or folder.name, config, metrics, *about, adapter=adapter.is_file())


def as_markdown(value: Any) -> str:
    r"""A value that stays text in Markdown, on its line and in its cell, whatever a name holds.

    >>> print(as_markdown("oak | *elm*\n# ash_1"))
    oak \| \*elm\* \# ash_1
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    line = re.sub(r"([\\`*<>|\[\]#~&$@]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", line)
    # addresses would become links by themselves
    return re.sub(r"(?i):/(?=/)|www(?=\.)", r"\g<0>\\", line)


def save_classifier(
    model: PreTrainedModel, folder: str | Path, metrics: dict[str, float] | None = None, repo: str | None = None
) -> None:
    """Save a calibrated classifier of any class with its image processor, the pipeline and a card.

    Args:
        model: The classifier, as `load_classifier` gives it.
        folder: Where to.
        metrics: What `calibrate` measured, for the card.
        repo: Where it will be on the Hub, if that is known.
    """
    folder = Path(folder)
    Calibration.of(model.config).threshold()  # refuses a model without
    with replacing(folder) as new, without_bars():
        model.save_pretrained(new)
        write_thresholds(model, new)
        if not isinstance(model.config, AvgKConfig):
            if not isinstance(model.config, TimmWrapperConfig):  # which holds its preprocessing
                image_processor(model).save_pretrained(new)
            carry_code(new)
    dataset, results = Calibration.of(model.config).source.get("dataset"), {"validation": metrics} if metrics else {}
    card = render_card(repo or folder.name, model.config, results, {}, dataset, calibrated_only=True)
    with new_file(folder / "README.md") as new:
        card.save(new)
