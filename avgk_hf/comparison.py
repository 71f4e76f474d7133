"""What is compared: losses, what each is tuned over, seeds, and which trainings that makes.

A finished training is one JSON file, whose name holds a digest of everything that decides on its results.
"""

import functools
import hashlib
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .files import write_text
from .losses import LOSSES, Loss, every_hyperparameter
from .recipes import (
    DataArguments,
    ModelArguments,
    check_combinations,
    model_arguments,
    parse_recipe,
    read_recipe,
)
from .sets import check_k, k_key
from .shell import is_secret
from .training_args import AvgKTrainingArguments

SCORES = ("softmax", "sigmoid")
SET_HERE = ("objective", "k", "calibrate_k", "seed", "seeds", "output_dir")  # by the comparison, not by its user
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
        budget: Trainings in which every loss is tuned; drawn evenly from its combinations, the same every time.
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
        if not isinstance(self.output_dir, str | Path):
            raise ValueError(f"output_dir={self.output_dir!r} must be the name of a folder.")
        if not isinstance(self.sweeps, list) or not all(isinstance(sweep, str) for sweep in self.sweeps):
            raise ValueError(f"sweeps={self.sweeps!r} must be a list of folders.")
        if not isinstance(self.losses, dict) or not self.losses:
            raise ValueError("losses: name at least one loss and what is searched, e.g. `losses: {ce: {}, avgk: {}}`.")
        if not isinstance(self.shared, dict):
            raise ValueError(f"shared={self.shared!r} must map fields to lists of values.")
        self.losses = {name: own or {} for name, own in self.losses.items()}
        for name, own in self.losses.items():
            if not isinstance(own, dict):
                raise ValueError(f"{name}: {own!r} must map fields to values, e.g. `{name}: {{}}`.")
            if self.objective(name) not in LOSSES or not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(
                    f"losses: {name!r} is unknown; choose among {', '.join(LOSSES)}, or set `objective:`."
                )
        blocks = {name: (model_arguments(self.objective(name)), AvgKTrainingArguments) for name in self.losses}
        known = {loss: {item.name for block in blocks[loss] for item in fields(block)} for loss in self.losses}
        of_all = set.intersection(*known.values())
        for place, own in [("shared", self.shared), *self.losses.items()]:
            for name, values in own.items():
                if (
                    name not in known.get(place, of_all)
                    or is_secret(name)
                    or (name in SET_HERE and (place == "shared" or name != "objective"))
                ):
                    raise ValueError(f"{place}: {name!r} cannot be set here; name a field of the model or training.")
                if (isinstance(values, list) or place == "shared") and not _different(values):
                    raise ValueError(f"{place}: {name}={values!r} must be a list of different values.")
            check_combinations(place, [v for v in {**self.shared, **own}.values() if isinstance(v, list)])
        if not isinstance(self.baseline, str) or self.baseline not in self.losses:
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
        for name in flags & every_hyperparameter() - of_all:
            raise ValueError(f"--{name} belongs to some of the losses only; set it in the file, for each of them.")
        self.arguments  # noqa: B018  (refuses a recipe that cannot be read)

    def objective(self, loss: str) -> str:
        """The objective that a loss of the comparison trains with."""
        return str(self.losses[loss].get("objective", loss))

    def loss(self, loss: str) -> type[Loss]:
        """The class of a loss of the comparison."""
        return LOSSES[self.objective(loss)]

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
        """What a loss is tuned over: `budget` of its combinations, drawn the same every time.

        Each next one is that whose values, alone and in pairs, were drawn least for their number: with few draws, too,
        every value of every field is tried about equally often.
        """
        own = self.losses[loss]
        fixed = {name: value for name, value in own.items() if not isinstance(value, list) and name != "objective"}
        grid = {**self.shared, **{name: values for name, values in own.items() if isinstance(values, list)}}
        grid = {name: values for name, values in grid.items() if name not in fixed}
        combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        random.Random(0).shuffle(combinations)
        drawn, seen = [], Counter()
        while combinations and len(drawn) < self.budget:  # a larger budget adds to a smaller one
            least = min(combinations, key=lambda values: sum(seen[part] * n for part, n in _parts(values, grid)))
            seen.update(part for part, _ in _parts(least, grid))
            combinations.remove(least)
            drawn.append({**fixed, **least})
        return drawn

    def tuned_ks(self, loss: str) -> list[float | None]:
        """The K that a loss is trained for while it is tuned; None for one that does not depend on K."""
        if not self.loss(loss).needs_k:
            return [None]
        return list(self.k) if self.tune_k is None else [self.tune_k]


def _parts(values: dict[str, Any], grid: dict[str, list[Any]]) -> Iterator[tuple[str, int]]:
    """The values of a combination, alone and in pairs, each with the number of alternatives to it."""
    for size in (1, 2):
        for names in itertools.combinations(values, size):
            yield json.dumps([(name, values[name]) for name in names]), math.prod(len(grid[name]) for name in names)


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
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
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
    runs = tuning_runs(comparison, loss, at if comparison.loss(loss).needs_k else None)
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
            epochs = num_epochs(comparison, chosen[loss, at]) / comparison.more_data**0.5  # more steps in all
            values = {**chosen[loss, at], "num_train_epochs": max(round(epochs), 1)}
            k = at if comparison.loss(loss).needs_k else None
            runs.append(Run("more_data", loss, k, values, comparison.tune_seed, tuple(comparison.k)))
    for seed in range(comparison.seeds):  # seed by seed, so that data are generated once
        for loss in comparison.losses:
            if comparison.loss(loss).needs_k:
                groups = [((k,), chosen[loss, k]) for k in comparison.k]
            else:  # one training for all K with the same hyperparameters
                own = [chosen[loss, k] for k in comparison.k]
                groups = [
                    (tuple(k for k, other in zip(comparison.k, own, strict=True) if other == values), values)
                    for i, values in enumerate(own)
                    if values not in own[:i]
                ]
            for ks, values in groups:
                k = ks[0] if comparison.loss(loss).needs_k else None
                if values is None:
                    unknown.append((loss, ks[0], seed))
                else:
                    runs.append(Run("final", loss, k, values, seed, ks))
    return runs, unknown


def num_epochs(comparison: Comparison, values: dict[str, Any]) -> float:
    """The epochs of a training with these hyperparameters."""
    return float(values.get("num_train_epochs", comparison.arguments[2].num_train_epochs))


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that the file is there whole or not at all."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
