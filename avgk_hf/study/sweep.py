"""Search hyperparameters on validation: `avgk sweep recipes/glyphs/avgk.yaml --search alpha=0.1,0.3,1,3,10 --seeds 3`.

Every combination of values is trained with every seed. Finished trials are kept in the output folder, by Optuna (the
default) in SQLite: the same command goes on after a crash, and with Optuna in a second shell takes part of the work.
The values with the highest mean validation average-K accuracy win; only they are evaluated on test, once per seed.
"""

import hashlib
import itertools
import json
import logging
import os
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ..checks import check_choice, check_whole
from ..files import output_folder, write_text
from ..losses import every_hyperparameter
from ..model_card import as_markdown
from ..recipes import check_combinations, parse_recipe, read_recipe
from ..scores import NotFinite
from ..train import run_seeds
from ..training_args import AvgKTrainingArguments
from .columns import ACCURACY, as_table
from .plots import sweep_curve
from .seeds import interval
from .spec import check_search, flag_names, plain, read_spec
from .training import as_flags, load_trainer, measured_only

METRIC = f"eval_{ACCURACY.metric}"
BATCH = "per_device_train_batch_size"
OWN = {"seed", "seeds", "output_dir"}  # what a sweep sets itself


@dataclass
class Sweep:
    """What is searched: the content of a sweep file, or of the command line.

    Args:
        recipe: The recipe that is varied.
        search: {field of the recipe: values to try}.
        seeds: Number of seeds of every combination: 0, 1, ...
        scale_learning_rate: Keep the ratio of learning rate to batch size where the batch size is searched.
        output_dir: Folder for study, table, plot and the winner's runs.
        backend: `"optuna"`, or `"ray"` for a cluster.
        overrides: Further `--field value` arguments for the recipe.
    """

    recipe: str
    search: dict[str, list[Any]] = field(default_factory=dict)
    seeds: int = 1
    scale_learning_rate: bool = False
    output_dir: str | None = None
    backend: str = "optuna"
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in flag_names(self.overrides) & OWN:
            raise ValueError(f"--{name}: a sweep has the seeds 0, 1, ... (`--seeds`) and its own folder (`--out`).")
        if not self.search:
            raise ValueError("nothing to search: name a field and its values, e.g. `--search alpha=0.1,1,10`.")
        training = {item.name for item in fields(AvgKTrainingArguments)} - OWN
        self.search = check_search("search", self.search, training | {"score", "head", *every_hyperparameter()})
        check_combinations("search", self.search.values())
        check_whole("seeds", self.seeds, 1)
        check_choice("backend", self.backend, BACKENDS)
        if self.output_dir is None:
            self.output_dir = f"runs/sweep-{Path(self.recipe).parent.name}-{Path(self.recipe).stem}"

    @property
    def grid(self) -> dict[str, list[Any]]:
        """The search with the seeds."""
        return {**self.search, "seed": list(range(self.seeds))}

    @property
    def digest(self) -> str:
        """Stands for recipe and overrides: trials of other ones are not comparable."""
        text = json.dumps([Path(self.recipe).read_text(), self.overrides, self.scale_learning_rate])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def combinations(self) -> list[dict[str, Any]]:
        """All combinations of the values."""
        return [dict(zip(self.search, values, strict=True)) for values in itertools.product(*self.search.values())]


def read_sweep(path: str, **given: Any) -> Sweep:
    """The sweep that a file describes, a recipe being one without a search; what is given besides it wins.

    Args:
        path: A sweep file (with a key `recipe`, relative to the file) or a recipe.
        given: Fields of `Sweep` from the command line; None where not given.
    """
    content = read_recipe(Path(path))
    return read_spec(Sweep, path, content if "recipe" in content else {"recipe": Path(path).name}, given)


def parse_search(texts: list[str]) -> dict[str, list[Any]]:
    """`["alpha=0.1,1"]` as `{"alpha": [0.1, 1]}`.

    >>> parse_search(["alpha=0.1,1", "head=ml,sccp"])
    {'alpha': [0.1, 1], 'head': ['ml', 'sccp']}
    """
    search = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"--search {text}: write the field and its values, e.g. `--search alpha=0.1,1,10`.")
        search[name.replace("-", "_")] = [plain(value) for value in values.split(",")]
    return search


def run_sweep(sweep: Sweep) -> dict[str, Any]:
    """Search, choose on validation, evaluate the winner on test, and write table and plot.

    Returns:
        What is written to sweep.json: the trials, their summary, the winner and its results.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("a sweep is shared by starting `avgk sweep` several times, not by several processes of one.")
    for values in sweep.combinations():  # a value that is refused is refused now, and not after hours
        parse_recipe([sweep.recipe, *sweep.overrides, *as_flags(values)])
    folder = output_folder(sweep.output_dir)
    try:
        return _search(sweep, folder)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; finished trainings are kept in {folder}, and the same command goes on.") from None


def _search(sweep: Sweep, folder: Path) -> dict[str, Any]:
    trials = BACKENDS[sweep.backend](sweep, folder)
    rows = summarise_trials(sweep, trials)
    missing = [row["values"] for row in rows if row["n"] + row["diverged"] < sweep.seeds]
    if missing:  # another worker is still at it
        print(f"{len(missing)} of {len(rows)} combinations are still being trained elsewhere; run the command again.")
        return {"search": sweep.search, "summary": rows}
    whole = [row for row in rows if not row["diverged"]]
    if not whole:
        raise ValueError("a training of every combination diverged, so there is no winner: search smaller values.")
    best = max(whole, key=lambda row: row["mean"])["values"]
    winner = folder / "-".join(["winner", *(f"{name}-{value}" for name, value in best.items()), sweep.digest])
    own = {**best, **_scaled(sweep, best), "output_dir": winner, "seed": 0, "seeds": sweep.seeds}
    own["resume_from_checkpoint"] = "last"
    with FileLock(folder / "winner.lock"):  # of several workers one trains it, and the others find it finished
        text = run_seeds([sweep.recipe, *sweep.overrides, *as_flags(own)], keep=True)
    found = {"recipe": sweep.recipe, "search": sweep.search, "seeds": sweep.seeds, "summary": rows, "winner": best}
    found["runs"] = str(winner)
    write_text(folder / "sweep.json", json.dumps({**found, "trials": trials}, indent=2) + "\n")
    write_text(folder / "sweep.md", f"{trials_table(rows, best)}\n\n{text}")
    for name in sweep.search:  # the rows that differ from the winner in nothing but one field
        along = [row for row in whole if {**row["values"], name: best[name]} == best]
        sweep_curve([{"value": row["values"][name], **row} for row in along], folder / f"{name}.png", name)
    return found


def summarise_trials(sweep: Sweep, trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each combination the mean validation accuracy over seeds, its interval, and how many trainings diverged."""
    rows = []
    for values in sweep.combinations():
        # a seed that was trained twice, by two workers at once, counts once
        of_seed = {trial["seed"]: trial["value"] for trial in trials if trial["values"] == values}
        kept = [value for value in of_seed.values() if value is not None]
        found = interval(kept) if kept else {"mean": None, "half_width": None, "n": 0}
        rows.append({"values": values, **found, "diverged": len(of_seed) - len(kept)})
    return rows


def trials_table(rows: list[dict[str, Any]], best: dict[str, Any]) -> str:
    """The summary as a table, the winner in bold."""
    body = []
    for row in rows:
        mark = "**" if row["values"] == best else ""
        text = f"{row['diverged']} diverged" if row["diverged"] else ACCURACY.cell(row)
        cells = [*(as_markdown(row["values"][name]) for name in best), text]
        body.append([*(f"{mark}{cell}{mark}" for cell in cells), str(row["n"])])
    return as_table([*best, f"validation {ACCURACY.title}", "seeds"], body)


def _scaled(sweep: Sweep, values: dict[str, Any]) -> dict[str, float]:
    """The learning rate for a searched batch size."""
    if not sweep.scale_learning_rate or BATCH not in values:
        return {}
    _, _, args = parse_recipe([sweep.recipe, *sweep.overrides])
    rate = values.get("learning_rate", args.learning_rate)
    return {"learning_rate": rate * values[BATCH] / args.per_device_train_batch_size}


def train_trial(sweep: Sweep, values: dict[str, Any]) -> float:
    """The best validation accuracy of one training; it keeps no checkpoints, and never sees the test split."""
    with tempfile.TemporaryDirectory() as folder:
        own = {**values, **_scaled(sweep, values)}
        trainer, _ = load_trainer(measured_only(sweep.recipe, sweep.overrides, own, folder))
        trainer.train()
        evaluated = [entry[METRIC] for entry in trainer.state.log_history if METRIC in entry]
        return max(evaluated or [trainer.evaluate()[METRIC]])


def _trial(sweep: Sweep, values: dict[str, Any], accuracy: float | None) -> dict[str, Any]:
    """What is kept of a trial; one that diverged has no accuracy."""
    return {"values": {name: values[name] for name in sweep.search}, "seed": values["seed"], "value": accuracy}


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


def _search_optuna(sweep: Sweep, folder: Path) -> list[dict[str, Any]]:
    try:
        import optuna
        from optuna.trial import TrialState
    except ImportError as error:
        raise ImportError("a sweep needs optuna: `pip install 'avgk_hf[sweep]'`.") from error
    # a trial that fails ends the sweep with a message of one line; optuna would put a traceback before it
    logging.getLogger("optuna.study._optimize").addFilter(_is_no_warning)
    with FileLock(folder / "study.lock"):  # two workers that begin together would both make the tables, and one fail
        study = optuna.create_study(
            storage=f"sqlite:///{folder / 'study.db'}",
            # what a study searches is fixed when it is made: another search is another study
            study_name=json.dumps({"recipe": sweep.digest, "grid": sweep.grid}),
            sampler=optuna.samplers.GridSampler(sweep.grid, seed=0),
            direction="maximize",
            load_if_exists=True,
        )

    def trials(*states: TrialState) -> list[Any]:
        return study.get_trials(deepcopy=False, states=states)

    ended = TrialState.COMPLETE, TrialState.PRUNED  # pruned: the training diverged
    known = [
        trial.system_attrs.get("fixed_params", trial.params)
        for trial in trials(*ended, TrialState.WAITING, TrialState.RUNNING)
    ]
    for trial in trials(TrialState.FAIL):  # interrupted: the sampler counts it
        if trial.params.keys() == sweep.grid.keys() and trial.params not in known:
            # as `enqueue_trial`, which would leave out the place in the grid that the sampler asks for
            attributes = {**trial.system_attrs, "fixed_params": trial.params}
            study.add_trial(optuna.create_trial(state=TrialState.WAITING, system_attrs=attributes))
            known.append(trial.params)
    done = len({json.dumps(trial.params, sort_keys=True) for trial in trials(*ended)})
    total = len(sweep.combinations()) * sweep.seeds
    print(f"{total} trainings, {done} of them finished; study in {folder / 'study.db'}")
    if done < total:

        def objective(trial: optuna.Trial) -> float:
            values = {name: trial.suggest_categorical(name, options) for name, options in sweep.grid.items()}
            try:
                return train_trial(sweep, values)
            except NotFinite as error:  # ends the trial, not the sweep
                raise optuna.TrialPruned(str(error)) from error

        study.optimize(objective, n_trials=total, gc_after_trial=True)  # the sampler ends it earlier
    return [_trial(sweep, trial.params, trial.value) for trial in trials(*ended)]


def _search_ray(sweep: Sweep, folder: Path) -> list[dict[str, Any]]:
    try:
        from ray import tune
    except ImportError as error:
        raise ImportError("--backend ray needs `pip install 'avgk_hf[ray]'`.") from error
    if " " in sys.executable:  # its workers would never start, and the sweep wait for ever
        raise ValueError(
            f"ray cannot start {sys.executable!r}, because of the space in its path: use --backend optuna."
        )

    here = Path.cwd()

    def trainable(values: dict[str, Any]) -> dict[str, float | None]:
        os.chdir(here)  # recipe and data may be named relative to it; ray's workers start in folders of their own
        try:
            return {"value": train_trial(sweep, values)}
        except NotFinite:
            return {"value": None}

    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "1")  # seconds after which a finished training is kept
    name = hashlib.sha256(json.dumps([sweep.digest, sweep.grid]).encode()).hexdigest()[:16]
    place = (folder / "ray").resolve()
    given = {
        "trainable": tune.with_resources(trainable, {"cpu": 1, "gpu": min(torch.cuda.device_count(), 1)}),
        "param_space": {name: tune.grid_search(options) for name, options in sweep.grid.items()},
    }
    if tune.Tuner.can_restore(str(place / name)):
        tuner = tune.Tuner.restore(str(place / name), resume_unfinished=True, restart_errored=True, **given)
    else:
        tuner = tune.Tuner(run_config=tune.RunConfig(name=name, storage_path=str(place)), **given)
    found = tuner.fit()
    for error in found.errors:
        raise ValueError(f"a training failed: {str(error).strip().splitlines()[-1]}")
    return [_trial(sweep, trial.config, trial.metrics["value"]) for trial in found]


BACKENDS = {"optuna": _search_optuna, "ray": _search_ray}
