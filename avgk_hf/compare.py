"""A fair comparison of losses on any dataset: `avgk compare recipes/glyphs/compare.yaml`.

Every loss is tuned on validation with the same number of trainings, then trained with every seed and looked at on test
once. A finished training is one JSON file that is never computed again: the same command goes on after a crash, and in
a second shell takes part of the work. Table and pictures are made from these files.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from filelock import FileLock, Timeout
from huggingface_hub.utils import disable_progress_bars
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from . import __version__
from .checkpoints import NotFinite
from .comparison import (
    SCORES,
    Comparison,
    Results,
    Run,
    best_of_curve,
    finished,
    num_epochs,
    plan,
    run_path,
    write_json,
)
from .data import prepare
from .data.glyphs import load_glyphs
from .files import output_folder
from .recipes import DataArguments, parse_recipe
from .set_statistics import SetStatistics
from .sets import HEADS, all_scores, k_key
from .shell import guarded, is_secret
from .train import load_all, load_data, make_trainer, set_size_counts
from .trainer import AvgKTrainer
from .training_args import AvgKTrainingArguments
from .verdict import write_comparison

TIMED_STEPS = 20


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
    blocks |= {name: getattr(args, name) for name in stated if hasattr(args, name) and not is_secret(name)}
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


def work(comparison: Comparison, workers: int = 1) -> None:
    """Do what is left, run after run; what another worker holds is left to it, and taken over if that one dies."""
    torch.set_num_threads(1)  # on every machine and with every number of workers the same rounding
    locks = output_folder(Path(comparison.output_dir) / ".locks")
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
                    write_json(path, results)
                    print(_progress(comparison, run, results, workers), flush=True)
            finally:
                lock.release()
            break
        else:
            time.sleep(1)  # all that is left is being done by others


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
            seconds += num_epochs(comparison, run.values) * factor * means.get(run.loss, other)
    for loss, _, seed in unknown:
        epochs = [num_epochs(comparison, values) for values in comparison.configurations(loss)]
        factor = comparison.more_data**0.5 if seed == comparison.tune_seed else 1
        seconds += sum(epochs) / len(epochs) * factor * means.get(loss, other)
    return seconds


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
    if comparison.tune_k is None and not all(comparison.loss(loss).needs_k for loss in comparison.losses):
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
    output_folder(comparison.output_dir)
    runs, unknown = plan(comparison)
    if unknown or any(finished(comparison, run) is None for run in runs):
        try:
            if workers == 1:
                work(comparison)
            else:
                _work_together(comparison, workers)
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped; finished runs are kept, and the same command goes on with the rest.") from None
    with FileLock(output_folder(Path(comparison.output_dir) / ".locks") / "report.lock"):
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
