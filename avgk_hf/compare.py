"""A fair comparison of losses on any dataset: `avgk compare recipes/glyphs/compare.yaml`.

Every loss is tuned on validation with the same number of trainings, then trained with every seed and looked at on test
once. A finished training is one JSON file that is never computed again: the same command goes on after a crash, and in
a second shell takes part of the work. Table and pictures are made from these files.
"""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from filelock import FileLock, Timeout
from huggingface_hub.utils import disable_progress_bars
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from . import __version__
from .configuration import OBJECTIVES
from .data import prepare
from .data.glyphs import load_glyphs, noise_bound, outline_bound
from .plots import accuracy_intervals, learning_curves, set_size_histogram, sweep_curve
from .report import as_text, interval
from .sets import HEADS, SetStatistics, all_scores, check_k, k_key
from .shell import guarded
from .train import (
    DataArguments,
    ModelArguments,
    load_all,
    load_data,
    make_trainer,
    parse_recipe,
    read_recipe,
    set_size_counts,
)
from .trainer import AvgKTrainer, NotFinite
from .training_args import AvgKTrainingArguments

K_FREE = ("ce", "an")  # losses that do not depend on K: trained once, calibrated for every K
SCORES = ("softmax", "sigmoid")
SHOWN = {
    "average_k_accuracy": "average-K accuracy",
    "mean_set_size": "mean set size",
    "few_shot_accuracy": "few shot",
    "medium_shot_accuracy": "medium shot",
    "many_shot_accuracy": "many shot",
}
ACCURACIES = [name for name in SHOWN if name.endswith("accuracy")]
SET_HERE = ("objective", "k", "calibrate_k", "seed", "seeds", "output_dir")  # by the comparison, not by its user
BOUND_IMAGES = 2000
TIMED_STEPS = 20
Results = dict[str, Any]  # the content of one JSON file


@dataclass
class Comparison:
    """What is compared: the content of a comparison file.

    Args:
        recipe: The recipe that all losses share; `objective` and `k` are replaced.
        losses: For each loss its own fields: a list is searched, one value is fixed. The name is the objective, unless
            a field `objective` says otherwise, so that variants of one loss can be compared.
        shared: {field: values} that are searched for every loss.
        k: Average set sizes.
        budget: Trainings in which every loss is tuned; drawn from the product of its values, the same every time.
        seeds: Number of seeds 0, 1, ... of the tuned losses.
        tune_k: Tune at this K for all; default: for every K by itself.
        tune_seed: Seed of the trainings that tune; not one of those reported.
        baseline: The loss that the others are compared with.
        more_data: For glyphs: train the baseline also on so many times the images, as a yardstick; 0 for none.
        sweeps: Folders of `avgk sweep`, whose curves are drawn where they exist.
        output_dir: Folder for results, table and pictures.
        overrides: Further `--field value` arguments for the recipe.
    """

    recipe: str
    losses: dict[str, dict[str, Any]]
    shared: dict[str, list[Any]]
    k: list[float]
    budget: int = 8
    seeds: int = 5
    tune_k: float | None = None
    tune_seed: int = 1000
    baseline: str = "ce"
    more_data: int = 0
    sweeps: list[str] = field(default_factory=list)
    output_dir: str = "runs/compare"
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.losses, dict) or not self.losses:
            raise ValueError("losses: name at least one loss and what is searched, e.g. `losses: {ce: {}, avgk: {}}`.")
        if not isinstance(self.shared, dict):
            raise ValueError(f"shared={self.shared!r} must map fields to lists of values.")
        self.losses = {name: own or {} for name, own in self.losses.items()}
        known = {item.name for block in (ModelArguments, AvgKTrainingArguments) for item in fields(block)}
        for place, own in [("shared", self.shared), *self.losses.items()]:
            if not isinstance(own, dict):
                raise ValueError(f"{place}: {own!r} must map fields to values, e.g. `{place}: {{}}`.")
            for name, values in own.items():
                if name not in known or (name in SET_HERE and (place == "shared" or name != "objective")):
                    raise ValueError(f"{place}: {name!r} cannot be set here; name a field of the model or training.")
                if (isinstance(values, list) or place == "shared") and not _different(values):
                    raise ValueError(f"{place}: {name}={values!r} must be a list of different values.")
        for name in self.losses:
            if self.objective(name) not in OBJECTIVES or not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(
                    f"losses: {name!r} is unknown; choose among {', '.join(OBJECTIVES)}, or set `objective:`."
                )
        if self.baseline not in self.losses:
            raise ValueError(f"baseline={self.baseline!r} is not among the losses {', '.join(self.losses)}.")
        if not _different(self.k):
            raise ValueError(f"k={self.k!r} must be a list of different sizes, e.g. `k: [2, 3, 5, 10]`.")
        self.k = sorted(check_k(k) for k in self.k)
        if self.tune_k is not None and self.tune_k not in self.k:
            raise ValueError(f"tune_k={self.tune_k!r} must be one of k={self.k}, or left out to tune for each.")
        for name, least in (("budget", 1), ("seeds", 1), ("tune_seed", 0), ("more_data", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
        if self.tune_seed < self.seeds:
            raise ValueError(f"tune_seed={self.tune_seed} must not be a seed that is reported, 0 to {self.seeds - 1}.")
        flags = {text[2:].split("=")[0].replace("-", "_") for text in self.overrides if text.startswith("--")}
        fixed = {*SET_HERE, *self.shared, *(name for own in self.losses.values() for name in own)}
        for name in flags & fixed:
            raise ValueError(f"--{name} is set by the comparison itself; change it in its file.")
        self.arguments  # noqa: B018  (refuses a recipe that cannot be read)

    def objective(self, loss: str) -> str:
        """The objective that a loss of the comparison trains with."""
        return str(self.losses[loss].get("objective", loss))

    @functools.cached_property
    def arguments(self) -> tuple[ModelArguments, DataArguments, AvgKTrainingArguments]:
        """The recipe with the overrides."""
        return parse_recipe([self.recipe, *self.overrides])

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """What the recipe's file states and the comparison does not replace."""
        return {name: value for name, value in read_recipe(Path(self.recipe)).items() if name not in SET_HERE}

    @property
    def on_glyphs(self) -> bool:
        """Whether the data are generated, and so the best possible answer known."""
        return self.arguments[1].dataset == "glyphs"

    def configurations(self, loss: str) -> list[dict[str, Any]]:
        """What a loss is tuned over: `budget` of its combinations, drawn the same every time."""
        own = self.losses[loss]
        fixed = {name: value for name, value in own.items() if not isinstance(value, list) and name != "objective"}
        grid = {**self.shared, **{name: values for name, values in own.items() if isinstance(values, list)}}
        grid = {name: values for name, values in grid.items() if name not in fixed}
        combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        random.Random(0).shuffle(combinations)  # so that a larger budget adds to a smaller one
        return [{**fixed, **values} for values in combinations[: self.budget]]

    def tuned_ks(self, loss: str) -> list[float | None]:
        """The K that a loss is trained for while it is tuned; None for one that does not depend on K."""
        if self.objective(loss) in K_FREE:
            return [None]
        return list(self.k) if self.tune_k is None else [self.tune_k]


def _different(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and len({json.dumps(value) for value in values}) == len(values)


@dataclass(frozen=True)
class Run:
    """One training of the comparison.

    Args:
        phase: `"tune"`, `"final"`, or `"more_data"`.
        loss: Name of the loss in the comparison.
        k: K of the training; None for a loss that does not depend on it.
        values: Its hyperparameters.
        seed: Of initialisation, batch order and generated data.
        ks: For which K it is reported: weights are kept of the epoch that is best on validation for each.
    """

    phase: str
    loss: str
    k: float | None
    values: dict[str, Any]
    seed: int
    ks: tuple[float, ...] = ()

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{self.phase} {self.loss}{'' if self.k is None else f' K={k_key(self.k)}'} seed {self.seed} ({values})"


def read_comparison(path: str, **given: Any) -> Comparison:
    """The comparison that a file describes; what is given besides it wins.

    Args:
        path: YAML file with the fields of `Comparison`; `recipe` is relative to it.
        given: Fields from the command line; None where not given.
    """
    content = read_recipe(Path(path))
    known = {item.name for item in fields(Comparison)} - {"overrides"}
    for name in content:
        if name not in known:
            raise ValueError(f"unknown field {name!r} in {path}; a comparison has {', '.join(sorted(known))}.")
    for name in ("recipe", "losses", "shared", "k"):
        if name not in content:
            raise ValueError(f"{path} has no field {name!r}. See recipes/glyphs/compare.yaml.")
    content["recipe"] = str(Path(path).parent / str(content["recipe"]))
    return Comparison(**{**content, **{name: value for name, value in given.items() if value}})


# -------------------------------------------------------------------------------------------------- what is to be done


def run_path(comparison: Comparison, run: Run) -> Path:
    """The file of a run's results; its name holds a digest of everything that decides on them."""
    what = {"recipe": comparison.fields, "overrides": comparison.overrides}
    what["objective"] = comparison.objective(run.loss)
    what |= {"all_k": comparison.k, "run": [run.phase, run.k, run.values, run.seed, list(run.ks)]}
    if run.phase == "more_data":
        what["times"] = comparison.more_data
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:10]
    k = "" if run.k is None else f"-k{k_key(run.k)}"
    return Path(comparison.output_dir) / "runs" / f"{run.phase}-{run.loss}{k}-seed{run.seed}-{digest}.json"


@functools.cache
def _read_finished(path: Path, _: int) -> Results:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): remove it, and it will be computed again.") from None


def finished(comparison: Comparison, run: Run) -> Results | None:
    """The results of a run, or None."""
    path = run_path(comparison, run)
    try:
        return _read_finished(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None


def tuning_runs(comparison: Comparison, loss: str, k: float | None) -> list[Run]:
    """The trainings that tune a loss for one K."""
    return [Run("tune", loss, k, values, comparison.tune_seed) for values in comparison.configurations(loss)]


def choose(comparison: Comparison, loss: str, k: float) -> dict[str, Any] | None:
    """The hyperparameters with the highest validation accuracy, or None while trainings are missing.

    Args:
        comparison: The comparison.
        loss: Name of the loss.
        k: The K to report.
    """
    at = k if comparison.tune_k is None else comparison.tune_k
    runs = tuning_runs(comparison, loss, None if comparison.objective(loss) in K_FREE else at)
    found = [finished(comparison, run) for run in runs]
    if any(result is None for result in found):
        return None
    values = [best_of_curve(result, at) for result in found]
    if max(values) < 0:
        raise ValueError(
            f"all {len(runs)} trainings of {loss} diverged ({found[0]['error']}); search smaller learning rates."
        )
    return runs[values.index(max(values))].values


def best_of_curve(result: Results, k: float) -> float:
    """The highest validation accuracy of any epoch; -1 for a training that diverged."""
    if result["error"]:
        return -1.0
    return max(point["average_k_accuracy"][k_key(k)] for point in result["curve"])


def plan(comparison: Comparison) -> tuple[list[Run], list[tuple[str, float, int]]]:
    """What there is to do.

    Returns:
        The runs that are known, in the order in which they are done; and (loss, K, seed) of those whose
        hyperparameters are not chosen yet.
    """
    runs = [
        run
        for loss in comparison.losses
        for k in comparison.tuned_ks(loss)
        for run in tuning_runs(comparison, loss, k)
    ]
    chosen = {(loss, k): choose(comparison, loss, k) for loss in comparison.losses for k in comparison.k}
    unknown = []
    if comparison.more_data and comparison.on_glyphs:  # first, because it takes longest
        loss, at = comparison.baseline, comparison.tune_k or comparison.k[0]
        if chosen[loss, at] is None:
            unknown.append((loss, at, comparison.tune_seed))
        else:
            epochs = _epochs(comparison, chosen[loss, at]) / comparison.more_data**0.5  # more steps, but not as many
            values = {**chosen[loss, at], "num_train_epochs": max(round(epochs), 1)}
            k = None if comparison.objective(loss) in K_FREE else at
            runs.append(Run("more_data", loss, k, values, comparison.tune_seed, tuple(comparison.k)))
    for seed in range(comparison.seeds):  # seed by seed, so that data are generated once
        for loss in comparison.losses:
            if comparison.objective(loss) not in K_FREE:
                groups = [((k,), chosen[loss, k]) for k in comparison.k]
            else:  # one training for all K with the same hyperparameters
                own = [chosen[loss, k] for k in comparison.k]
                groups = [
                    (tuple(k for k, other in zip(comparison.k, own, strict=True) if other == values), values)
                    for i, values in enumerate(own)
                    if values not in own[:i]
                ]
            for ks, values in groups:
                k = None if comparison.objective(loss) in K_FREE else ks[0]
                if values is None:
                    unknown.append((loss, ks[0], seed))
                else:
                    runs.append(Run("final", loss, k, values, seed, ks))
    return runs, unknown


# ------------------------------------------------------------------------------------------------------- doing one run


class BestWeights(TrainerCallback):
    """Keeps in memory, for each K, the weights of the epoch with the highest validation accuracy.

    Args:
        ks: The K to keep weights for.
        own: The K of the model, whose metrics have no `@K` in their names.
    """

    def __init__(self, ks: Sequence[float], own: float) -> None:
        self.ks, self.own = ks, own
        self.best: dict[float, tuple[float, int, float]] = {}  # K: accuracy, step, epoch
        self.weights: dict[int, dict[str, torch.Tensor]] = {}  # by step

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], model: Any, **kwargs: Any
    ) -> None:
        """Look at one epoch."""
        for k in self.ks:
            value = metrics["eval_average_k_accuracy" + _suffix(k, self.own)]
            if k not in self.best or value > self.best[k][0]:
                self.best[k] = (value, state.global_step, state.epoch)
                if state.global_step not in self.weights:
                    self.weights[state.global_step] = {n: t.detach().clone() for n, t in model.state_dict().items()}
        steps = {step for _, step, _ in self.best.values()}
        self.weights = {step: weights for step, weights in self.weights.items() if step in steps}


def _suffix(k: float, own: float) -> str:
    return "" if k == own else f"@{k_key(k)}"


class _Data:
    """The last data that were loaded, which the next run usually needs again."""

    def __init__(self) -> None:
        self._key, self._splits = None, None
        self.ready: dict[str, Dataset] = {}  # train and validation with the tensors that they keep

    def get(self, data_args: DataArguments, args: AvgKTrainingArguments, times: int) -> DatasetDict:
        key = json.dumps([vars(data_args), times], sort_keys=True)
        if key != self._key:
            self._key, self.ready = None, {}
            self._splits = load_all(data_args, args) if times == 1 else load_glyphs(data_args.glyphs_seed, times=times)
            self._key = key
        if data_args.test_split not in self._splits:
            raise ValueError(
                f"the dataset {data_args.dataset!r} has no split {data_args.test_split!r}, only"
                f" {list(self._splits)}: a comparison needs test images; name them with `test_split:`."
            )
        return self._splits


_data = _Data()


def _flags(values: dict[str, Any]) -> list[str]:
    return [f"--{n}={json.dumps(v) if isinstance(v, (bool, dict)) else v}" for n, v in values.items()]


def _arguments(comparison: Comparison, run: Run, folder: str) -> tuple:
    """The recipe's three blocks for one run; nothing but the log is written to the folder."""
    own = {"objective": comparison.objective(run.loss), "k": run.k or comparison.tune_k or comparison.k[0]}
    own |= {**run.values, "seed": run.seed, "seeds": 1, "output_dir": folder, "save_strategy": "no"}
    own |= {"load_best_model_at_end": False, "eval_strategy": "epoch", "logging_strategy": "epoch"}
    own |= {"disable_tqdm": True, "report_to": "none"}
    if comparison.on_glyphs:
        own["glyphs_seed"] = run.seed
    ks = ["--calibrate_k", *map(str, comparison.k)]
    model_args, data_args, args = parse_recipe([comparison.recipe, *comparison.overrides, *_flags(own), *ks])
    args.early_stopping_patience = None  # the number of epochs is searched, and the best epoch kept
    return model_args, data_args, args


def _trainer(comparison: Comparison, run: Run, folder: str) -> tuple[AvgKTrainer, dict[str, Dataset], dict[str, Any]]:
    """The trainer of a run, its data, without test where it tunes, and what the recipe came to."""
    model_args, data_args, args = _arguments(comparison, run, folder)
    splits = _data.get(data_args, args, comparison.more_data if run.phase == "more_data" else 1)
    if run.phase == "tune":
        splits = DatasetDict({name: split for name, split in splits.items() if name != data_args.test_split})
    data, _ = load_data(data_args, args, splits)
    trainer = make_trainer(model_args, data_args, args, {**data, **_data.ready})
    if data_args.cache_images:
        _data.ready = {"train": trainer.train_dataset, "validation": trainer.eval_dataset}
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    blocks = {**vars(model_args), **vars(data_args), "dataset": trainer.dataset_name}
    stated = [*comparison.fields, *run.values]
    blocks |= {name: getattr(args, name) for name in stated if hasattr(args, name)}
    config = {name: getattr(value, "value", value) for name, value in blocks.items() if name != "output_dir"}
    return trainer, data, config


def measure(
    trainer: AvgKTrainer, dataset: Dataset, ks: Sequence[float], thresholds: dict | None = None
) -> dict[tuple[str, str], SetStatistics]:
    """Every score of every head in one pass over a dataset.

    Args:
        trainer: Holds model and settings.
        dataset: Prepared images.
        ks: Average set sizes.
        thresholds: {(score, head): {K: lambda_val}}; None to calibrate.

    Returns:
        {(score, head): statistics}.
    """
    config = trainer.model.config
    kinds = dict.fromkeys((config.score, *SCORES))
    heads = HEADS if config.sccp_head else ("ml",)
    found = {
        (kind, head): SetStatistics(ks, len(dataset), thresholds and thresholds[kind, head], config.train_counts)
        for kind in kinds
        for head in heads
    }
    trainer.model.eval()
    for batch in trainer.get_eval_dataloader(dataset):
        batch = trainer._prepare_inputs(batch)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            outputs = trainer.model(pixel_values=batch["pixel_values"], return_dict=True)
        for kind in kinds:
            for head, scores in all_scores(outputs.logits, outputs.sccp_logits, kind).items():
                found[kind, head].update(scores, batch["labels"])
    return found


def _report_weights(trainer: AvgKTrainer, test: Dataset, ks: Sequence[float]) -> dict[str, Any]:
    """Calibrate the trainer's model on validation and evaluate it on test: each once, for all K, heads and scores."""
    config = trainer.model.config
    validation = measure(trainer, trainer.eval_dataset, ks)
    calibrated = {key: statistics.compute() for key, statistics in validation.items()}
    thresholds = {key: {k: of_k[k]["lambda_val"] for k in ks} for key, of_k in calibrated.items()}
    tested = measure(trainer, prepare(test, config), ks, thresholds)
    results = {key: statistics.compute() for key, statistics in tested.items()}
    heads = {k: config.head if config.head != "auto" else best_head(calibrated, config.score, k) for k in ks}
    return {
        "score": config.score,
        "head": {k_key(k): head for k, head in heads.items()},
        "validation": _nested(calibrated),
        "test": _nested(results),
        "set_sizes": {k_key(k): set_size_counts(tested[config.score, heads[k]], k, config.train_counts) for k in ks},
    }


def best_head(calibrated: dict, score: str, k: float) -> str:
    """The head with the highest validation accuracy."""
    return max(
        (head for kind, head in calibrated if kind == score),
        key=lambda head: calibrated[score, head][k]["average_k_accuracy"],
    )


def _nested(results: dict[tuple[str, str], dict[float, dict[str, float]]]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (kind, head), of_k in results.items():
        nested.setdefault(kind, {})[head] = {k_key(k): metrics for k, metrics in of_k.items()}
    return nested


def train_run(comparison: Comparison, run: Run) -> Results:
    """Train one run and return what is written to its file; a training that diverges has an `error` and no results."""
    start, cpu_start = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer, data, config = _trainer(comparison, run, folder)
        own = trainer.model.config.k
        best = BestWeights(run.ks, own)
        trainer.add_callback(best)
        error, kept = None, []
        try:
            trainer.train()
            for step in sorted({step for _, step, _ in best.best.values()}):
                trainer.model.load_state_dict(best.weights[step])
                ks = [k for k in run.ks if best.best[k][1] == step]
                # a model is reported at its own K, and to see what another K would have lost, at the others
                found = _report_weights(trainer, data["test"], comparison.k)
                kept.append({"k": ks, "step": step, "epoch": best.best[ks[0]][2], **found})
        except NotFinite as divergence:
            error = str(divergence)
        versions = {name: version(name) for name in ("torch", "timm", "transformers", "datasets")}
        return {
            "phase": run.phase,
            "loss": run.loss,
            "objective": comparison.objective(run.loss),
            "k": run.k,
            "values": run.values,
            "seed": run.seed,
            "config": config,
            "versions": {"avgk_hf": __version__, **versions},
            "images": {part: len(split) for part, split in data.items()},
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,  # what it would take on a machine that does nothing else
            "epochs": float(trainer.state.epoch or 0),
            "error": error,
            "curve": _curve(trainer.state.log_history, comparison.k, own),
            "kept": kept,
        }


def _curve(history: list[dict[str, Any]], ks: Sequence[float], own: float) -> list[dict[str, Any]]:
    """Training loss and validation metrics of every epoch."""
    losses = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    return [
        {
            "epoch": entry["epoch"],
            "train_loss": losses.get(entry["step"]),
            "validation_loss": entry["eval_loss"],
            "top1_accuracy": entry["eval_top1_accuracy"],
            "average_k_accuracy": {k_key(k): entry["eval_average_k_accuracy" + _suffix(k, own)] for k in ks},
        }
        for entry in history
        if "eval_average_k_accuracy" in entry
    ]


# ------------------------------------------------------------------------------------------------------ doing them all


def work(comparison: Comparison, workers: int = 1) -> None:
    """Do what is left, run after run; what another worker holds is left to it, and taken over if that one dies."""
    torch.set_num_threads(1)  # on every machine and with every number of workers the same rounding
    locks = Path(comparison.output_dir) / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    while True:
        runs, unknown = plan(comparison)
        left = [run for run in runs if finished(comparison, run) is None]
        if not left and not unknown:
            return
        for run in left:
            path = run_path(comparison, run)
            lock = FileLock(locks / f"{path.stem}.lock")  # the system releases it when the process ends, however
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue
            try:
                if not path.exists():
                    results = train_run(comparison, run)
                    _write(path, results)
                    print(_progress(comparison, run, results, workers), flush=True)
            finally:
                lock.release()
            break
        else:
            time.sleep(1)  # all that is left is being done by others


def _write(path: Path, content: Any) -> None:
    """Write JSON so that the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    os.replace(new, path)


def _progress(comparison: Comparison, run: Run, results: Results, workers: int) -> str:
    runs, unknown = plan(comparison)
    done = sum(finished(comparison, other) is not None for other in runs)
    value = results["error"] or f"validation {100 * best_of_curve(results, _own_k(comparison, run)):.2f}"
    left = time_left(comparison) / workers
    return f"[{done}/{len(runs) + len(unknown)}] {run}: {value}, {_duration(results['seconds'])}" + (
        f"; about {_duration(left)} left" if left else ""
    )


def _own_k(comparison: Comparison, run: Run) -> float:
    return run.k or comparison.tune_k or comparison.k[0]


def _duration(seconds: float) -> str:
    """Seconds as a person would say them.

    >>> _duration(42), _duration(600), _duration(9000)
    ('42 s', '10 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def time_left(comparison: Comparison, per_epoch: float | None = None) -> float:
    """Seconds of one worker for everything that is not finished.

    Args:
        comparison: The comparison.
        per_epoch: Seconds of an epoch, for losses without a finished run; default: the mean of the others.
    """
    runs, unknown = plan(comparison)
    times: dict[str, list[float]] = {}
    for run in runs:
        result = finished(comparison, run)
        if result is not None and result["epochs"]:
            factor = comparison.more_data if run.phase == "more_data" else 1
            times.setdefault(run.loss, []).append(result["seconds"] / result["epochs"] / factor)
    means = {loss: sum(values) / len(values) for loss, values in times.items()}
    other = sum(means.values()) / len(means) if means else per_epoch or 0.0
    seconds = 0.0
    for run in runs:
        if finished(comparison, run) is None:
            factor = comparison.more_data if run.phase == "more_data" else 1
            seconds += _epochs(comparison, run.values) * factor * means.get(run.loss, other)
    for loss, _, seed in unknown:
        epochs = [_epochs(comparison, values) for values in comparison.configurations(loss)]
        factor = comparison.more_data**0.5 if seed == comparison.tune_seed else 1
        seconds += sum(epochs) / len(epochs) * factor * means.get(loss, other)
    return seconds


def _epochs(comparison: Comparison, values: dict[str, Any]) -> float:
    return float(values.get("num_train_epochs", comparison.arguments[2].num_train_epochs))


def describe(comparison: Comparison, workers: int) -> str:
    """The plan, and how long it will take: from finished runs, or from a few timed steps."""
    runs, unknown = plan(comparison)
    done = [run for run in runs if finished(comparison, run) is not None]
    lines = [f"{len(runs) + len(unknown)} trainings, {len(done)} of them finished; results in {comparison.output_dir}"]
    for loss in comparison.losses:
        tuned, final = comparison.tuned_ks(loss), [run for run in runs if run.phase == "final" and run.loss == loss]
        number = len(final) + sum(name == loss and seed != comparison.tune_seed for name, _, seed in unknown)
        at = "once for all K" if tuned == [None] else f"for K = {', '.join(k_key(k) for k in tuned)}"
        count = len(tuned) * len(comparison.configurations(loss))
        lines.append(f"  {loss}: {count} trainings to tune it ({at}), {number} to report")
    if comparison.tune_k is None and any(comparison.objective(loss) in K_FREE for loss in comparison.losses):
        lines.append("  losses without K are trained again for each K that prefers other hyperparameters")
    if comparison.more_data and comparison.on_glyphs:
        lines.append(f"  {comparison.baseline} on {comparison.more_data} times the training images")
    if len(done) == len(runs) and not unknown:
        return "\n".join([*lines, "nothing is left to do"])
    per_epoch = None
    if done:
        source = f"from the {len(done)} finished"
    else:
        per_epoch = time_epoch(comparison)
        source = f"from {TIMED_STEPS} timed steps of {next(iter(comparison.losses))}, {per_epoch:.1f} s an epoch"
    left = time_left(comparison, per_epoch)
    lines.append(f"about {_duration(left / workers)} with {workers} worker(s), estimated {source}")
    return "\n".join(lines)


def time_epoch(comparison: Comparison) -> float:
    """Seconds of an epoch with its evaluation, from a few steps of the first loss."""
    torch.set_num_threads(1)
    run = plan(comparison)[0][0]
    with tempfile.TemporaryDirectory() as folder:
        trainer, _, _ = _trainer(comparison, run, folder)
        args = trainer.args
        in_epoch = len(trainer.get_train_dataloader()) / args.gradient_accumulation_steps
        args.max_steps, args.eval_strategy = TIMED_STEPS, "no"
        if comparison.arguments[1].cache_images:  # an epoch of a real run finds them
            for split in (trainer.train_dataset, trainer.eval_dataset):
                for start in range(0, len(split), 256):
                    split[start : start + 256]
        start = time.perf_counter()
        trainer.train()
        step = (time.perf_counter() - start) / TIMED_STEPS
        start = time.perf_counter()
        trainer.evaluate()
        return step * in_epoch + time.perf_counter() - start


def _worker(comparison: Comparison, workers: int) -> None:
    """What a process of its own does; it ends with the one that started it."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    disable_progress_bars()
    sys.exit(guarded("compare", lambda: work(comparison, workers)))


def run_comparison(comparison: Comparison, workers: int = 1, dry_run: bool = False) -> str:
    """Do the comparison, or what is left of it, and write report.md, report.json and pictures.

    Args:
        comparison: What to compare.
        workers: Processes, with one thread each; several shells may run the same command besides.
        dry_run: Only say what would be done and how long it would take.

    Returns:
        The report, or the plan.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("a comparison is shared by `--workers`, or by several shells, not by accelerate or torchrun.")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers={workers!r} must be a whole number of at least 1.")
    if dry_run:
        return describe(comparison, workers)
    Path(comparison.output_dir).mkdir(parents=True, exist_ok=True)
    runs, unknown = plan(comparison)
    if unknown or any(finished(comparison, run) is None for run in runs):
        try:
            if workers == 1:
                work(comparison)
            else:
                _work_together(comparison, workers)
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped; finished runs are kept, and the same command goes on with the rest.") from None
    locks = Path(comparison.output_dir) / ".locks"
    locks.mkdir(exist_ok=True)
    with FileLock(locks / "report.lock"):
        return write_comparison(comparison)


def _work_together(comparison: Comparison, workers: int) -> None:
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    processes = [context.Process(target=_worker, args=(comparison, workers)) for _ in range(workers)]
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(0.2)
                if process.exitcode:
                    raise ValueError(
                        f"a worker ended with exit code {process.exitcode}; its message stands above. The same command"
                        " goes on from here."
                    )
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        if before is None:
            os.environ.pop("OMP_NUM_THREADS")
        else:
            os.environ["OMP_NUM_THREADS"] = before


# ---------------------------------------------------------------------------------------------------------- the report


def summarise(comparison: Comparison) -> dict[str, Any]:
    """All numbers of the report, from the files of the finished runs."""
    runs, unknown = plan(comparison)
    results = [(run, finished(comparison, run)) for run in runs]
    if unknown or any(result is None for _, result in results):
        raise ValueError(f"{comparison.output_dir} is not complete: run the command again without --dry-run.")
    final = {  # {(loss, K): {seed: what is reported}}
        (loss, k): dict(_reported(results, loss, k)) for loss in comparison.losses for k in comparison.k
    }
    limits = _limits(comparison, results)
    rows = []
    for (loss, k), entries in final.items():
        row = {"loss": loss, "k": k, "values": choose(comparison, loss, k), "seeds": sorted(entries)}
        row["metrics"] = _intervals([_answer(entry, k) for entry in entries.values()], SHOWN)
        row["difference"] = _differences(entries, final[comparison.baseline, k], lambda entry, k=k: _answer(entry, k))
        row["to_best"] = {
            name: of_k[k_key(k)] - row["metrics"]["average_k_accuracy"]["mean"]
            for name, of_k in limits.items()
            if "average_k_accuracy" in row["metrics"]
        }
        rows.append(row)
    failed = [f"{run}: {result['error']}" for run, result in results if result["error"] and run.phase != "tune"]
    return {
        "dataset": results[0][1]["config"]["dataset"],
        "images": next(result["images"] for run, result in results if run.phase == "final"),
        "k": comparison.k,
        "tune_k": comparison.tune_k,
        "baseline": comparison.baseline,
        "budget": {loss: len(comparison.configurations(loss)) for loss in comparison.losses},
        "seeds": comparison.seeds,
        "versions": results[0][1]["versions"],
        "rows": rows,
        "limits": limits,
        "heads": _heads(comparison, final),
        "scores": _scores(comparison, final),
        "transfer": _transfer(comparison, final),
        "diverged": failed,
        "diverged_tuning": sum(bool(result["error"]) for run, result in results if run.phase == "tune"),
        "hours": sum(result["seconds"] for _, result in results) / 3600,
    }


def _reported(results: list[tuple[Run, Results]], loss: str, k: float) -> Iterator[tuple[int, dict[str, Any]]]:
    """(seed, what was kept for this K) of a loss."""
    for run, result in results:
        if run.phase == "final" and run.loss == loss:
            for entry in result["kept"]:
                if k in entry["k"]:
                    yield run.seed, entry


def _answer(entry: dict[str, Any], k: float, split: str = "test") -> dict[str, float]:
    """The metrics of the score and head that answer."""
    return entry[split][entry["score"]][entry["head"][k_key(k)]][k_key(k)]


def _intervals(found: list[dict[str, float]], names: Sequence[str]) -> dict[str, Any]:
    return {name: interval([m[name] for m in found]) for name in names if found and all(name in m for m in found)}


def _differences(
    own: dict[int, dict], other: dict[int, dict], metrics: Callable[[dict], dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """Of every accuracy the difference to another loss with the same seeds: interval, and how many seeds it won."""
    pairs = [(metrics(own[seed]), metrics(other[seed])) for seed in sorted(own.keys() & other.keys())]
    return {
        name: {
            **interval(values),
            "won": sum(value > 0 for value in values),
            "lost": sum(value < 0 for value in values),
        }
        for name in ACCURACIES
        if (values := [a[name] - b[name] for a, b in pairs if name in a and name in b])
    }


def _limits(comparison: Comparison, results: list[tuple[Run, Results]]) -> dict[str, dict[str, float]]:
    """The yardsticks of generated data: {name: {K: accuracy}}."""
    if not comparison.on_glyphs:
        return {}
    path = Path(comparison.output_dir) / "bounds.json"
    stored = json.loads(path.read_text()) if path.is_file() else {}
    if not all(k_key(k) in stored.get("noise", {}) for k in comparison.k):
        stored = {
            "outline": {k_key(k): value for k, value in outline_bound(comparison.k).items()},
            "noise": {k_key(k): value for k, value in noise_bound(comparison.k, BOUND_IMAGES).items()},
            "images": BOUND_IMAGES,
        }
        _write(path, stored)
    limits = {
        "bound from outlines": stored["outline"],
        "bound from noise": {key: value["accuracy"] for key, value in stored["noise"].items()},
    }
    for run, result in results:
        if run.phase == "more_data" and not result["error"]:
            entries = {k_key(k): _answer(entry, k) for entry in result["kept"] for k in entry["k"]}
            name = f"{run.loss} on {comparison.more_data} times the data"
            limits[name] = {key: metrics["average_k_accuracy"] for key, metrics in entries.items()}
    return limits


def _heads(comparison: Comparison, final: dict) -> list[dict[str, Any]]:
    """For losses with two heads: each, their mean, and the one chosen on validation, as accuracy and against ML."""
    rows = []
    for (loss, k), entries in final.items():
        if not entries or any("sccp" not in entry["test"][entry["score"]] for entry in entries.values()):
            continue

        def metrics(entry: dict, head: str, k: float = k) -> dict[str, float]:
            if head == "auto":
                on_validation = entry["validation"][entry["score"]]
                head = max(on_validation, key=lambda name: on_validation[name][k_key(k)]["average_k_accuracy"])
            return entry["test"][entry["score"]][head][k_key(k)]

        for head in (*HEADS, "auto"):
            found = _intervals([metrics(entry, head) for entry in entries.values()], SHOWN)
            against = {
                seed: {"own": metrics(entry, head), "ml": metrics(entry, "ml")} for seed, entry in entries.items()
            }
            values = [
                pair["own"]["average_k_accuracy"] - pair["ml"]["average_k_accuracy"] for pair in against.values()
            ]
            rows.append({"loss": loss, "k": k, "head": head, "metrics": found, "to_ml": interval(values)})
    return rows


def _scores(comparison: Comparison, final: dict) -> list[dict[str, Any]]:
    """What thresholding the sigmoid instead of the softmax gives, with the head that answers."""
    rows = []
    for (loss, k), entries in final.items():
        for kind in SCORES if entries else ():
            of_kind = [entry["test"][kind][entry["head"][k_key(k)]][k_key(k)] for entry in entries.values()]
            rows.append({"loss": loss, "k": k, "score": kind, "metrics": _intervals(of_kind, SHOWN)})
    return rows


def _transfer(comparison: Comparison, final: dict) -> list[dict[str, Any]]:
    """Models trained for one K, calibrated for and tested at another."""
    rows = []
    for (loss, k), entries in final.items():
        if comparison.objective(loss) in K_FREE or not entries:
            continue
        for other in comparison.k:
            found = _intervals([_answer(entry, other) for entry in entries.values()], SHOWN)
            rows.append({"loss": loss, "trained": k, "tested": other, "metrics": found})
    return rows


def markdown(summary: dict[str, Any]) -> str:
    """The report as Markdown."""
    images, seeds = summary["images"], summary["seeds"]
    at = "for each K" if summary["tune_k"] is None else f"at K = {k_key(summary['tune_k'])}"
    sizes = ", ".join(f"{number} {part}" for part, number in images.items())
    budgets = sorted(set(summary["budget"].values()))
    lines = [
        f"# Comparison on {summary['dataset']}",
        "",
        f"{sizes} images; {seeds} seeds. Every loss was tuned {at} by {' to '.join(map(str, budgets))} trainings with"
        " a seed of their own, by validation average-K accuracy; the epoch that is kept was chosen on validation as"
        " well, for every K by itself. Thresholds come from validation, the numbers below from test. Mean ± half width"
        " of the 95% confidence interval over seeds (Student's t); accuracies in percent, few, medium and many shot"
        f" are means over classes. Differences to {summary['baseline']} are paired by seed; `won` counts the seeds"
        " ahead of it.",
        "",
    ]
    if seeds < 5:
        lines += [f"**{seeds} seed(s) are too few to conclude anything; take 5 or more.**", ""]
    for text in summary["diverged"]:
        lines += [f"**Missing:** {text}", ""]
    if summary["diverged_tuning"]:
        lines += [f"{summary['diverged_tuning']} of the trainings to tune diverged; they count as worst.", ""]
    limits = summary["limits"]
    for k in summary["k"]:
        rows = [row for row in summary["rows"] if row["k"] == k]
        names = [name for name in SHOWN if any(name in row["metrics"] for row in rows)]
        titles = [SHOWN[name].replace("-K", f"-{k_key(k)}") for name in names]
        head = ["loss", *titles, f"difference to {summary['baseline']}", "won", *(f"to {name}" for name in limits)]
        lines += [f"## K = {k_key(k)}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for row in rows:
            cells = [_cell(row["metrics"].get(name), name != "mean_set_size") for name in names]
            difference = row["difference"].get("average_k_accuracy")
            own = row["loss"] == summary["baseline"]
            cells += ["–", "–"] if own else [_cell(difference, sign=True), _won(difference)]
            cells += [f"{100 * row['to_best'][name]:.2f}" if name in row["to_best"] else "–" for name in limits]
            lines.append(f"| {row['loss']} | {' | '.join(cells)} |")
        lines.append("")
    lines += _difference_by_shot(summary)
    if limits:
        lines += ["## The best possible", "", _explain_limits(summary), ""]
        lines += ["| | " + " | ".join(f"K = {k_key(k)}" for k in summary["k"]) + " |"]
        lines.append("|---" * (1 + len(summary["k"])) + "|")
        for name, of_k in limits.items():
            lines.append(f"| {name} | " + " | ".join(f"{100 * of_k[k_key(k)]:.3f}" for k in summary["k"]) + " |")
        lines.append("")
    lines += ["## What was chosen on validation", "", "| loss | K | hyperparameters |", "|---|---|---|"]
    for row in summary["rows"]:
        values = ", ".join(f"{name} {value}" for name, value in row["values"].items())
        lines.append(f"| {row['loss']} | {k_key(row['k'])} | {values} |")
    lines += ["", *_ablations(summary)]
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any] | None, percent: bool = True, sign: bool = False) -> str:
    if found is None:
        return "–"
    text = as_text(found, percent)
    return f"+{text}" if sign and found["mean"] >= 0 else text


def _won(found: dict[str, Any] | None) -> str:
    return "–" if found is None else f"{found['won']}/{found['n']}"


def _difference_by_shot(summary: dict[str, Any]) -> list[str]:
    names = [name for name in ACCURACIES if any(name in row["difference"] for row in summary["rows"])]
    others = [row for row in summary["rows"] if row["loss"] != summary["baseline"]]
    if not others:
        return []
    lines = [f"## Paired differences to {summary['baseline']}, by shot", ""]
    lines.append(f"| loss | K | {' | '.join(SHOWN[name] for name in names)} |")
    lines.append("|---" * (2 + len(names)) + "|")
    for row in others:
        found = [row["difference"].get(name) for name in names]
        cells = [f"{_cell(of, sign=True)} ({_won(of)})" if of else "–" for of in found]
        lines.append(f"| {row['loss']} | {k_key(row['k'])} | {' | '.join(cells)} |")
    return [*lines, ""]


def _explain_limits(summary: dict[str, Any]) -> str:
    return (
        "The generator is known, so the average-K accuracy of the best classifier can be enclosed. *Bound from"
        " outlines*: a classifier that is told face and outline confuses only characters whose outlines are equal to"
        " the bit, and gives them their frequencies; exact, and an upper bound, because blur, noise and unknown place"
        " are ignored. *Bound from noise*: one that is told face, place and severity, and knows the probability of"
        f" every pixel under the noise; estimated on {BOUND_IMAGES} drawn images, still an upper bound, because no"
        " classifier of images is told these. Both are nearly 100% from K = 2 on. The same model trained on many times"
        " the data, where it is listed, shows what can be reached: it bounds the best possible from below, up to the"
        " chance of its test images."
    )


def _ablations(summary: dict[str, Any]) -> list[str]:
    lines = []
    tables = (
        ("heads", "Which head answers", "head", "auto: the head with the highest validation accuracy, for each seed."),
        ("scores", "Which score is thresholded", "score", "With the head that answers in the tables above."),
    )
    for part, title, column, note in tables:
        rows = summary[part]
        if not rows:
            continue
        kinds = list(dict.fromkeys(row[column] for row in rows))
        lines += [f"## {title}", "", note, "", f"| loss | K | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
        for loss, k in dict.fromkeys((row["loss"], row["k"]) for row in rows):
            found = {
                row[column]: row["metrics"].get("average_k_accuracy")
                for row in rows
                if (row["loss"], row["k"]) == (loss, k)
            }
            lines.append(f"| {loss} | {k_key(k)} | {' | '.join(_cell(found.get(kind)) for kind in kinds)} |")
        lines.append("")
    if summary["transfer"]:
        lines += ["## Trained for one K, calibrated for another", ""]
        lines += [f"| loss | trained for | {' | '.join(f'tested at K = {k_key(k)}' for k in summary['k'])} |"]
        lines.append("|---" * (2 + len(summary["k"])) + "|")
        for loss, k in dict.fromkeys((row["loss"], row["trained"]) for row in summary["transfer"]):
            cells = [
                _cell(row["metrics"].get("average_k_accuracy"))
                for row in summary["transfer"]
                if (row["loss"], row["trained"]) == (loss, k)
            ]
            lines.append(f"| {loss} | {k_key(k)} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def write_comparison(comparison: Comparison) -> str:
    """Write report.md, report.json and the pictures to the output folder and return the Markdown."""
    summary = summarise(comparison)
    text = markdown(summary)
    folder = Path(comparison.output_dir)
    (folder / "report.md").write_text(text)
    _write(folder / "report.json", summary)
    for ending in ("png", "svg"):
        _pictures(comparison, summary, folder, ending)
    return text


def _pictures(comparison: Comparison, summary: dict[str, Any], folder: Path, ending: str) -> None:
    curves: dict[str, list] = {}
    for row in summary["rows"]:
        if "average_k_accuracy" in row["metrics"]:
            curves.setdefault(row["loss"], []).append({"k": row["k"], **row["metrics"]["average_k_accuracy"]})
    limits = {name: {float(key): value for key, value in of_k.items()} for name, of_k in summary["limits"].items()}
    accuracy_intervals(curves, folder / f"accuracy_against_k.{ending}", limits)
    runs = [(run, finished(comparison, run)) for run in plan(comparison)[0]]
    k = min(comparison.k, key=lambda k: abs(k - 5))  # the paper's
    shown = list(dict.fromkeys((comparison.baseline, *(["avgk"] if "avgk" in comparison.losses else []))))
    sizes = {loss: _pooled(dict(_reported(runs, loss, k)), k) for loss in shown}
    title = f"Set sizes on test, K = {k_key(k)}, all seeds"
    if all(sizes.values()):
        set_size_histogram({loss: of["all"] for loss, of in sizes.items()}, folder / f"set_sizes.{ending}", title)
        by_shot = {
            f"{name} shot": sizes[shown[-1]][name] for name in ("few", "medium", "many") if sum(sizes[shown[-1]][name])
        }
        set_size_histogram(by_shot, folder / f"set_sizes_by_shot.{ending}", f"{title}, {shown[-1]}")
    longest = {}
    for loss in comparison.losses:
        tuned = [result for run, result in runs if run.phase == "tune" and run.loss == loss and not result["error"]]
        at = comparison.tune_k or comparison.k[0]
        tuned = [result for result in tuned if result["k"] in (None, at)]
        if tuned:  # of the longest trainings the best, because a short one may end before it overfits
            most = max(result["epochs"] for result in tuned)
            best = max((r for r in tuned if r["epochs"] == most), key=lambda r: best_of_curve(r, at))
            longest[loss] = [
                {"epoch": p["epoch"], "accuracy": p["average_k_accuracy"][k_key(at)], "loss": p["validation_loss"]}
                for p in best["curve"]
            ]
    title = f"The longest trainings that tuned each loss, K = {k_key(comparison.tune_k or comparison.k[0])}"
    learning_curves(longest, folder / f"learning_curves.{ending}", title)
    for sweep in comparison.sweeps:
        path = Path(sweep) / "sweep.json"
        content = json.loads(path.read_text()) if path.is_file() else {"search": {}}
        if len(content["search"]) == 1:
            (name,) = content["search"]
            whole = [row for row in content["summary"] if row["n"] and not row["diverged"]]
            points = [{"value": row["values"][name], **row} for row in whole]
            sweep_curve(points, name, folder / f"sensitivity_{Path(sweep).name}.{ending}")


def _pooled(entries: dict[int, dict[str, Any]], k: float) -> dict[str, list[int]]:
    """The set sizes of all seeds together."""
    pooled: dict[str, list[int]] = {}
    for entry in entries.values():
        for name, counts in entry["set_sizes"][k_key(k)].items():
            pooled[name] = [a + b for a, b in itertools.zip_longest(pooled.get(name, []), counts, fillvalue=0)]
    return pooled
