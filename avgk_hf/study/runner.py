"""A fair comparison of losses on any dataset: `avgk compare recipes/glyphs/compare.yaml`.

Every loss is tuned on validation with the same number of trainings, then trained with every seed and looked at on test
once. A finished training is one JSON file that is never computed again: the same command goes on after a crash, and in
a second shell takes part of the work. Table and pictures are made from these files.
"""

import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from datasets import Dataset
from filelock import FileLock, Timeout
from huggingface_hub.utils import disable_progress_bars
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from .. import __version__
from ..checks import check_whole
from ..evaluation import Evaluation
from ..features import Features
from ..files import output_folder, write_text
from ..recipes import Arguments
from ..scope import Balancing
from ..scores import NotFinite
from ..sets import k_key, metric_name
from ..shell import guarded, is_secret
from ..statistics import set_size_counts
from ..train import as_input
from ..trainer import AvgKTrainer
from .balances import measure_balances
from .report import SCORES, write_comparison
from .spec import Comparison, Results, Run, best_of_curve, finished, num_epochs, plan, run_path
from .training import load_trainer, measured_only
from .variants import Kind, Variant, chosen, mirrored, to_calibrate, to_test

TIMED_STEPS = 20


@contextmanager
def _one_thread() -> Iterator[None]:
    """On every machine and with every number of workers the same rounding; afterwards the caller's threads again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class BestWeights(TrainerCallback):
    """Keeps in memory, for each K, the weights of the epoch with the highest validation accuracy."""

    def __init__(self, ks: Sequence[float], own: float) -> None:
        self.ks, self.own = ks, own
        self.best: dict[float, tuple[float, int, float]] = {}  # K: accuracy, step, epoch
        self.weights: dict[int, dict[str, torch.Tensor]] = {}  # by step

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], model: Any, **kwargs: Any
    ) -> None:
        """Look at one epoch."""
        for k in self.ks:
            value = _accuracy(metrics, k, self.own)
            if k not in self.best or value > self.best[k][0]:
                self.best[k] = (value, state.global_step, state.epoch)
                if state.global_step not in self.weights:
                    self.weights[state.global_step] = {n: t.detach().clone() for n, t in model.state_dict().items()}
        steps = {step for _, step, _ in self.best.values()}
        self.weights = {step: weights for step, weights in self.weights.items() if step in steps}


def _accuracy(metrics: dict[str, float], k: float, own: float) -> float:
    """The validation accuracy for one K; the metrics of the model's own have no `@K` in their names."""
    return metrics[metric_name("eval_average_k_accuracy", k, own)]


def run_arguments(comparison: Comparison, run: Run, folder: str) -> Arguments:
    """The recipe's three blocks for one run; nothing but the log is written to the folder."""
    own = {"objective": comparison.objective(run.loss), "k": run.k or comparison.first_k, **run.values}
    own |= {"seed": run.seed, "seeds": 1, "eval_strategy": "epoch", "logging_strategy": "epoch"}
    own |= {"disable_tqdm": True, "report_to": "none"}
    if comparison.on_glyphs:
        own["glyphs_seed"] = run.seed
    ks = ["--calibrate_k", *map(str, comparison.k)]
    return measured_only(comparison.recipe, [*comparison.overrides, *ks], own, folder)


def run_trainer(
    comparison: Comparison, run: Run, folder: str
) -> tuple[AvgKTrainer, dict[str, Dataset], dict[str, Any]]:
    """The trainer of a run, its data, those of test as the model takes them, and what the recipe came to."""
    model_args, data_args, args = arguments = run_arguments(comparison, run, folder)
    trainer, data = load_trainer(arguments, run.times, run.phase == "tune", needs_test=True)
    if "test" in data:
        data["test"] = as_input(data["test"], trainer.model, data_args, args, keep=False)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    blocks = {**vars(model_args), **vars(data_args), "dataset": trainer.dataset_name}
    stated = [*comparison.fields, *run.values]
    blocks |= {name: getattr(args, name) for name in stated if hasattr(args, name) and not is_secret(name)}
    config = {name: getattr(value, "value", value) for name, value in blocks.items() if name != "output_dir"}
    return trainer, data, config


def measure(
    trainer: AvgKTrainer,
    dataset: Dataset,
    ks: Sequence[float],
    given: dict | None = None,
    variants: dict[Kind, Variant] | None = None,
) -> dict[str, Evaluation]:
    """Every score of every head in one pass over a dataset.

    Args:
        trainer: Holds model and settings.
        dataset: Prepared images.
        ks: Average set sizes.
        given: {score: {head: {K: lambda_val}}}; None to calibrate.
        variants: What else is collected in the same pass.

    Returns:
        {score: evaluation}.
    """
    config = trainer.model.config
    found = {
        kind: Evaluation(
            config,
            len(dataset),
            ks,
            given is None,
            score=kind,
            thresholds=given and given[kind],
            balancing=Balancing(),
        )
        for kind in dict.fromkeys((config.score, *SCORES))
    }
    variants = variants or {}
    flip = any(variant.flip for variant in variants.values())
    with mirrored(trainer.model) if flip else nullcontext():
        trainer.collect([*found.values(), *variants.values()], trainer.get_eval_dataloader(dataset))
    return found


def _test_weights(trainer: AvgKTrainer, test: Dataset, ks: Sequence[float]) -> dict[str, Any]:
    """Calibrate the trainer's model on validation and evaluate it on test: each once, for all K, heads and scores."""
    config = trainer.model.config
    calibrated = to_calibrate(config, len(trainer.eval_dataset), ks, flip=not isinstance(test, Features))
    validation = measure(trainer, trainer.eval_dataset, ks, variants=calibrated)
    thresholds = {kind: evaluation.lambdas() for kind, evaluation in validation.items()}
    evaluated = to_test(config, len(test), ks, calibrated)
    tested = measure(trainer, test, ks, thresholds, evaluated)
    own, of_head = validation[config.score], tested[config.score].statistics
    heads = {k: config.head if config.head != "auto" else own.best_head(k) for k in ks}
    sizes = {k: set_size_counts((of := of_head[heads[k]]).set_sizes(k), of.labels, config.train_counts) for k in ks}
    return {
        "score": config.score,
        "head": {k_key(k): head for k, head in heads.items()},
        "validation": _nested(validation),
        "test": _nested(tested),
        "set_sizes": {k_key(k): found for k, found in sizes.items()},
        "variants": chosen(calibrated, evaluated),
    }


def _nested(found: dict[str, Evaluation]) -> dict[str, Any]:
    return {
        kind: {head: {k_key(k): metrics for k, metrics in of_k.items()} for head, of_k in evaluation.results.items()}
        for kind, evaluation in found.items()
    }


@_one_thread()
def train_run(comparison: Comparison, run: Run) -> Results:
    """Train one run and return what is written to its file; a training that diverges has an `error` and no results."""
    start, cpu_start = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer, data, config = run_trainer(comparison, run, folder)
        best = BestWeights(run.ks, trainer.model.config.k)
        trainer.add_callback(best)
        error, kept = None, []
        try:
            trainer.train()
            for step in sorted({step for _, step, _ in best.best.values()}):
                trainer.model.load_state_dict(best.weights[step])
                ks = [k for k in run.ks if best.best[k][1] == step]
                # a model is reported at its own K, and to see what another K would have lost, at the others
                found = _test_weights(trainer, data["test"], comparison.k)
                if comparison.balances:
                    found["balances"] = measure_balances(trainer, data["test"], comparison.k)
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
        "curve": _curve(trainer.state.log_history, comparison.k, trainer.model.config.k),
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
            "average_k_accuracy": {k_key(k): _accuracy(entry, k, own) for k in ks},
        }
        for entry in history
        if "eval_average_k_accuracy" in entry
    ]


def _locks(comparison: Comparison) -> Path:
    return output_folder(Path(comparison.output_dir) / ".locks")


def work(comparison: Comparison, workers: int = 1) -> None:
    """Do what is left, run after run; what another worker holds is left to it, and taken over if that one dies."""
    locks = _locks(comparison)
    while left := [run for run in plan(comparison) if finished(comparison, run) is None]:
        for run in left:
            path = run_path(comparison, run)
            if run.values is None:  # not chosen yet
                continue
            try:  # the system releases the lock when the process ends, however
                lock = FileLock(locks / f"{path.stem}.lock").acquire(blocking=False)
            except Timeout:
                continue
            with lock:
                if not path.exists():
                    results = train_run(comparison, run)
                    write_text(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
                    print(_progress(comparison, run, results, workers), flush=True)
            break
        else:
            time.sleep(1)  # all that is left is being done by others


def _progress(comparison: Comparison, run: Run, results: Results, workers: int) -> str:
    runs = plan(comparison)
    done = sum(finished(comparison, other) is not None for other in runs)
    value = results["error"] or f"validation {100 * best_of_curve(results, run.k or comparison.first_k):.2f}"
    left = time_left(comparison) / workers
    text = f"[{done}/{len(runs)}] {run}: {value}, {_duration(results['seconds'])}"
    return f"{text}; about {_duration(left)} left" if left else text


def _duration(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))} h"


def time_left(comparison: Comparison, per_epoch: float = 0.0) -> float:
    """Seconds of one worker for all that is not finished, `per_epoch` for losses of which no other run is known."""
    times, left = defaultdict(list), []
    for run in plan(comparison):
        result = finished(comparison, run)
        if result is None:
            left.append(run)
        elif result["epochs"]:
            times[run.loss].append(result["seconds"] / result["epochs"] / run.times)
    means = {loss: mean(values) for loss, values in times.items()}
    other = mean(means.values()) if means else per_epoch
    return sum(num_epochs(comparison, run) * means.get(run.loss, other) for run in left)


def describe_plan(comparison: Comparison, workers: int) -> str:
    """What there is to do, and how long it will take: from finished runs, or from a few timed steps."""
    runs = plan(comparison)
    done = sum(finished(comparison, run) is not None for run in runs)
    lines = [f"{len(runs)} trainings, {done} of them finished; results in {comparison.output_dir}"]
    for loss in comparison.losses:
        tuned, phases = comparison.tuned_ks(loss), [run.phase for run in runs if run.loss == loss]
        at = "once for all K" if tuned == [None] else f"for K = {', '.join(k_key(k) for k in tuned)}"
        count = {phase: phases.count(phase) for phase in ("tune", "final")}
        lines.append(f"  {loss}: {count['tune']} trainings to tune it ({at}), {count['final']} to report")
    if comparison.tune_k is None and not all(comparison.loss(loss).needs_k for loss in comparison.losses):
        lines.append("  losses without K are trained again for each K that prefers other hyperparameters")
    if comparison.more_data and comparison.on_glyphs:
        lines.append(f"  {comparison.baseline} on {comparison.more_data} times the training images")
    if done == len(runs):
        return "\n".join([*lines, "nothing is left to do"])
    per_epoch, source = 0.0, f"from the {done} finished"
    if not done:
        per_epoch = time_epoch(comparison)
        source = f"from {TIMED_STEPS} timed steps of {next(iter(comparison.losses))}, {per_epoch:.1f} s an epoch"
    left = time_left(comparison, per_epoch)
    lines.append(f"about {_duration(left / workers)} with {workers} worker(s), estimated {source}")
    return "\n".join(lines)


@_one_thread()
def time_epoch(comparison: Comparison) -> float:
    """Seconds of an epoch with its evaluation, from a few steps of the first loss."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, _, _ = run_trainer(comparison, plan(comparison)[0], folder)
        args = trainer.args
        in_epoch = len(trainer.get_train_dataloader()) / args.gradient_accumulation_steps
        args.max_steps, args.eval_strategy = TIMED_STEPS, "no"
        if comparison.arguments[1].cache_images:  # an epoch of a real run finds them
            for _ in itertools.chain(trainer.train_dataset, trainer.eval_dataset):
                pass
        start = time.perf_counter()
        trainer.train()
        step = (time.perf_counter() - start) / TIMED_STEPS
        start = time.perf_counter()
        trainer.evaluate()
        return step * in_epoch + time.perf_counter() - start


def run_comparison(comparison: Comparison, workers: int = 1, dry_run: bool = False, so_far: bool = False) -> str:
    """Do the comparison, or what is left of it, and write report.md, report.json and pictures.

    Args:
        comparison: What to compare.
        workers: Processes, with one thread each; several shells may run the same command besides.
        dry_run: Only say what would be done and how long it would take.
        so_far: Train nothing, and report what is finished.

    Returns:
        The report, or the plan.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("a comparison is shared by `--workers`, or by several shells, not by accelerate or torchrun.")
    check_whole("workers", workers, 1)
    if dry_run:
        return describe_plan(comparison, workers)
    output_folder(comparison.output_dir)
    try:
        if so_far:
            pass
        elif workers == 1:
            work(comparison)
        elif any(finished(comparison, run) is None for run in plan(comparison)):
            _work_together(comparison, workers)
    except KeyboardInterrupt as stop:
        raise type(stop)("stopped; finished runs are kept, and the same command goes on with the rest.") from None
    with FileLock(_locks(comparison) / "report.lock"):
        return write_comparison(comparison, so_far)


def _work_together(comparison: Comparison, workers: int) -> None:
    context = multiprocessing.get_context("spawn")
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


def _worker(comparison: Comparison, workers: int) -> None:
    """What a process of its own does; it ends with the one that started it."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    disable_progress_bars()
    sys.exit(guarded("compare", lambda: work(comparison, workers)))
