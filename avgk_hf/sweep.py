"""Search hyperparameters on validation: `avgk sweep recipes/glyphs/avgk.yaml --search alpha=0.1,0.3,1,3,10 --seeds 3`.

Every combination of values is trained with every seed by the Trainer's own `hyperparameter_search`. With Optuna (the
default) finished trials are kept in SQLite in the output folder: the same command goes on after a crash, and in a
second shell takes part of the work. The combination with the highest mean validation average-K accuracy wins; only it
is then evaluated on test, once per seed.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import set_seed

from .checkpoints import NotFinite
from .files import output_folder, write_text
from .losses import every_hyperparameter
from .model_card import as_markdown
from .modeling import AvgKForImageClassification
from .plots import sweep_curve
from .recipes import check_combinations, parse_recipe, read_recipe
from .report import as_text, interval
from .shell import is_secret
from .train import build_model, load_data, make_trainer, run_seeds
from .trainer import AvgKTrainer
from .training_args import AvgKTrainingArguments

METRIC = "eval_average_k_accuracy"
BACKENDS = ("optuna", "ray")
OWN = ("seed", "seeds", "output_dir")  # what a sweep sets itself


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
    search: dict[str, list[Any]]
    seeds: int = 1
    scale_learning_rate: bool = False
    output_dir: str | None = None
    backend: str = "optuna"
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.output_dir, str | Path | None):
            raise ValueError(f"output_dir={self.output_dir!r} must be the name of a folder.")
        for text in self.overrides:
            if text.partition("=")[0].removeprefix("--").replace("-", "_") in OWN:
                raise ValueError(f"{text}: a sweep has the seeds 0, 1, ... (`--seeds`) and its own folder (`--out`).")
        if not isinstance(self.search, dict) or not self.search:
            raise ValueError("nothing to search: name a field and its values, e.g. `--search alpha=0.1,1,10`.")
        training = {f.name for f in fields(AvgKTrainingArguments)}
        for name, values in self.search.items():
            if name not in _of_model() and (name not in training or name in OWN or is_secret(name)):
                known = sorted({*_of_model(), "learning_rate", "num_train_epochs", "per_device_train_batch_size"})
                raise ValueError(f"search: {name!r} cannot be searched; choose among {', '.join(known)} and the like.")
            values = [_plain(value) for value in values] if isinstance(values, list) else values
            if not isinstance(values, list) or not values or any(values.count(value) > 1 for value in values):
                raise ValueError(f"search: {name}={values!r} must be a list of different values.")
            self.search = {**self.search, name: values}
        check_combinations("search", self.search.values())
        if not isinstance(self.seeds, int) or self.seeds < 1:
            raise ValueError(f"seeds={self.seeds!r} must be a whole number, at least 1.")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is unknown; choose one of {list(BACKENDS)}.")
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
    if "recipe" in content:
        known = {f.name for f in fields(Sweep)} - {"overrides"}
        unknown = [name for name in content if name not in known]
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r} in {path}; a sweep has {', '.join(sorted(known))}.")
        content = {"search": {}, **content, "recipe": str(Path(path).parent / str(content["recipe"]))}
    else:
        content = {"recipe": path, "search": {}}
    return Sweep(**{**content, **{name: value for name, value in given.items() if value is not None}})


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
        search[name.replace("-", "_")] = [_plain(value) for value in values.split(",")]
    return search


def _plain(value: Any) -> Any:
    """Text as the number or truth value that it writes; YAML's own rules take 1e-3 for text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def run_sweep(sweep: Sweep) -> dict[str, Any]:
    """Search, choose on validation, evaluate the winner on test, and write table and plot.

    Returns:
        What is written to sweep.json: the trials, their summary, the winner and its results.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("a sweep is shared by starting `avgk sweep` several times, not by several processes of one.")
    for values in sweep.combinations():  # a value that is refused is refused now, and not after hours
        parse_recipe([sweep.recipe, *sweep.overrides, *_flags(values)])
    folder = output_folder(sweep.output_dir)
    try:
        return _run(sweep, folder)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; finished trainings are kept in {folder}, and the same command goes on.") from None


def _run(sweep: Sweep, folder: Path) -> dict[str, Any]:
    trials = {"optuna": _search_optuna, "ray": _search_ray}[sweep.backend](sweep, folder)
    rows = summarise(sweep, trials)
    missing = [row["values"] for row in rows if row["n"] + row["diverged"] < sweep.seeds]
    if missing:  # another worker is still at it
        print(f"{len(missing)} of {len(rows)} combinations are still being trained elsewhere; run the command again.")
        return {"search": sweep.search, "summary": rows}
    whole = [row for row in rows if not row["diverged"]]
    if not whole:
        raise ValueError("a training of every combination diverged, so there is no winner: search smaller values.")
    best = max(whole, key=lambda row: row["mean"])["values"]
    values = [f"{name}-{value}" for name, value in best.items()]
    winner = folder / "-".join(["winner", *values, sweep.digest])
    overrides = [*_flags({**best, **_scaled(sweep, best)}), "--output_dir", str(winner), "--seed", "0"]
    overrides += ["--resume_from_checkpoint", "last"]
    with FileLock(folder / "winner.lock"):  # of several workers one trains it, and the others find it finished
        text = run_seeds([sweep.recipe, *sweep.overrides, *overrides, "--seeds", str(sweep.seeds)], keep=True)
    found = {"recipe": sweep.recipe, "search": sweep.search, "seeds": sweep.seeds, "summary": rows, "winner": best}
    found["runs"] = str(winner)
    write_text(folder / "sweep.json", json.dumps({**found, "trials": trials}, indent=2) + "\n")
    write_text(folder / "sweep.md", markdown(rows, best) + "\n" + text)
    for name in sweep.search:
        sweep_curve(_along(rows, name, best), name, folder / f"{name}.png")
    return found


def summarise(sweep: Sweep, trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each combination the mean validation accuracy over seeds, its interval, and how many trainings diverged."""
    rows = []
    for values in sweep.combinations():
        # a seed that was trained twice, by two workers at once, counts once
        of_seed = {trial["seed"]: trial["value"] for trial in trials if trial["values"] == values}
        kept = [value for value in of_seed.values() if value is not None]
        found = interval(kept) if kept else {"mean": None, "half_width": None, "n": 0}
        rows.append({"values": values, **found, "diverged": len(of_seed) - len(kept)})
    return rows


def markdown(rows: list[dict[str, Any]], best: dict[str, Any]) -> str:
    """The summary as a table, the winner in bold."""
    names = list(best)
    lines = [f"| {' | '.join(names)} | validation average-K accuracy | seeds |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        mark = "**" if row["values"] == best else ""
        cells = [f"{mark}{as_markdown(row['values'][name])}{mark}" for name in names]
        text = f"{row['diverged']} diverged" if row["diverged"] else as_text(row, percent=True)
        lines.append(f"| {' | '.join(cells)} | {mark}{text}{mark} | {row['n']} |")
    return "\n".join(lines) + "\n"


def _along(rows: list[dict[str, Any]], name: str, best: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that differ from the winner in nothing but one field, without those that diverged."""
    others = [other for other in best if other != name]
    return [
        {"value": row["values"][name], **{key: row[key] for key in ("mean", "half_width")}}
        for row in rows
        if not row["diverged"] and all(row["values"][other] == best[other] for other in others)
    ]


def _flags(values: dict[str, Any]) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def _of_model() -> set[str]:
    """What of the model can be searched; the recipe's parser refuses what is not of its objective."""
    return {"score", "head", *every_hyperparameter()}


def _scaled(sweep: Sweep, values: dict[str, Any]) -> dict[str, float]:
    """The learning rate for a searched batch size."""
    batch = "per_device_train_batch_size"
    if not sweep.scale_learning_rate or batch not in values:
        return {}
    _, _, args = parse_recipe([sweep.recipe, *sweep.overrides])
    rate = values.get("learning_rate", args.learning_rate)
    return {"learning_rate": rate * values[batch] / args.per_device_train_batch_size}


def _trainer(sweep: Sweep, folder: Path) -> AvgKTrainer:
    """A trainer that builds the model of a trial; it keeps no checkpoints, and never sees the test split."""
    kept = ["--output_dir", str(folder / "trials"), "--save_strategy", "no", "--load_best_model_at_end", "false"]
    model_args, data_args, args = parse_recipe([sweep.recipe, *sweep.overrides, *kept])
    args.early_stopping_patience = None  # its count would go on from one trial to the next
    data, _ = load_data(data_args, args)
    classes = data["train"].features["label"].names

    def model_init(trial: Any) -> AvgKForImageClassification:
        values = _values(sweep, trial)
        if isinstance(trial, dict):  # ray's, which the trainer reads next
            trial.update(_scaled(sweep, values))
        own = {name: value for name, value in values.items() if name in _of_model()}
        # the stock trainer reads the seed of a trial only after its model is made
        set_seed(values.get("seed", args.seed))
        model = build_model(replace(model_args, **own), classes)
        set_seed(values.get("seed", args.seed))
        return model

    return make_trainer(model_args, data_args, args, data, model_init)


def _values(sweep: Sweep, trial: Any) -> dict[str, Any]:
    """What a trial has drawn; optuna draws when it is asked for the first time, ray's trials are the values."""
    if trial is None or isinstance(trial, dict):
        return trial or {}
    return {name: trial.suggest_categorical(name, options) for name, options in sweep.grid.items()}


def _best_so_far(trainer: Any) -> Any:
    """The objective of a trial: its best evaluation, as the best checkpoint of a training would be chosen."""

    def objective(metrics: dict[str, float]) -> float:
        history = [entry[METRIC] for entry in trainer.state.log_history if METRIC in entry]
        return max([metrics[METRIC], *history])

    return objective


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
    grid = sweep.grid
    # what a study searches is fixed when it is made: another search is another study
    name = json.dumps({"recipe": sweep.digest, "grid": grid})
    # optuna's own default ends trials that are below the median: every value of a curve would rest on other seeds
    place = {"storage": f"sqlite:///{folder / 'study.db'}", "study_name": name, "pruner": optuna.pruners.NopPruner()}
    sampler = optuna.samplers.GridSampler(grid, seed=0)
    with FileLock(folder / "study.lock"):  # two workers that begin together would both make the tables, and one fail
        study = optuna.create_study(**place, sampler=sampler, direction="maximize", load_if_exists=True)
    ended = [TrialState.COMPLETE, TrialState.PRUNED]  # pruned: the training diverged
    finished = study.get_trials(deepcopy=False, states=ended)
    queued = study.get_trials(deepcopy=False, states=[TrialState.WAITING, TrialState.RUNNING])
    known = [trial.system_attrs.get("fixed_params", trial.params) for trial in (*finished, *queued)]
    for trial in study.get_trials(deepcopy=False, states=[TrialState.FAIL]):  # interrupted: the sampler counts it
        if trial.params.keys() == grid.keys() and trial.params not in known:
            # as `enqueue_trial`, which would leave out the place in the grid that the sampler asks for
            attributes = {**trial.system_attrs, "fixed_params": trial.params}
            study.add_trial(optuna.create_trial(state=TrialState.WAITING, system_attrs=attributes))
            known.append(trial.params)
    done = {json.dumps(trial.params, sort_keys=True) for trial in finished}
    total = len(sweep.combinations()) * sweep.seeds
    print(f"{total} trainings, {len(done)} of them finished; study in {folder / 'study.db'}")
    if len(done) < total:
        trainer = _trainer(sweep, folder)
        train = trainer.train

        def attempt(*args: Any, **kwargs: Any) -> Any:
            """A training that diverges ends its trial, not the sweep."""
            try:
                return train(*args, **kwargs)
            except NotFinite as error:
                raise optuna.TrialPruned(str(error)) from error

        trainer.train = attempt

        def space(trial: Any) -> dict[str, Any]:
            """What of a trial the training arguments take."""
            values = _values(sweep, trial)
            own = {name: value for name, value in values.items() if name not in _of_model()}
            return {**own, **_scaled(sweep, values)}

        try:
            trainer.hyperparameter_search(
                space, _best_so_far(trainer), n_trials=total, direction="maximize", backend="optuna", sampler=sampler,
                load_if_exists=True, **place,
            )  # fmt: skip
        except ValueError:  # also where it looks for the best trial, and all have diverged
            if {trial.state for trial in study.get_trials(deepcopy=False)} != {TrialState.PRUNED}:
                raise
        shutil.rmtree(folder / "trials", ignore_errors=True)
    return [
        {
            "values": {key: trial.params[key] for key in sweep.search},
            "seed": trial.params["seed"],
            "value": trial.value if trial.state == TrialState.COMPLETE else None,
        }
        for trial in study.get_trials(deepcopy=False, states=ended)
    ]


def _search_ray(sweep: Sweep, folder: Path) -> list[dict[str, Any]]:
    try:
        from ray import tune
    except ImportError as error:
        raise ImportError("--backend ray needs `pip install 'ray[tune]'`.") from error
    if " " in sys.executable:  # its workers would never start, and the sweep wait for ever
        raise ValueError(
            f"ray cannot start {sys.executable!r}, because of the space in its path: use --backend optuna."
        )
    trainer = _trainer(sweep, folder)
    space = {name: tune.grid_search(options) for name, options in sweep.grid.items()}
    best = trainer.hyperparameter_search(
        lambda _: space, _best_so_far(trainer), n_trials=1, direction="maximize", backend="ray",
        storage_path=str((folder / "ray").resolve()), name="sweep",
    )  # fmt: skip
    return [
        {
            "values": {key: trial.config[key] for key in sweep.search},
            "seed": trial.config["seed"],
            "value": trial.last_result["objective"],
        }
        for trial in best.run_summary.trials
    ]
