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
from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from ..checks import check_choice, check_whole, is_number
from ..losses import LOSSES, Loss, every_hyperparameter
from ..recipes import Arguments, check_combinations, model_arguments, parse_recipe, read_recipe
from ..scope import GRID
from ..sets import check_k, k_key
from ..shell import is_secret
from ..training_args import AvgKTrainingArguments

SET_HERE = {"objective", "k", "calibrate_k", "seed", "seeds", "output_dir"}  # by the comparison, not by its user
Results = dict[str, Any]  # the content of one JSON file
Spec = TypeVar("Spec")


def read_spec(kind: type[Spec], path: str, content: dict[str, Any], given: dict[str, Any]) -> Spec:
    """A comparison or a sweep, from the content of a file, and what is given on the command line and not None."""
    known = {item.name: item for item in fields(kind) if item.name != "overrides"}
    for name in content:
        if name not in known:
            raise ValueError(f"unknown field {name!r} in {path}; known are {', '.join(sorted(known))}.")
    for name, item in known.items():
        if name not in content and item.default is item.default_factory is MISSING:
            raise ValueError(f"{path} has no field {name!r}. See recipes/glyphs.")
    if not isinstance(content.get("output_dir", ""), str | None):
        raise ValueError(f"output_dir={content['output_dir']!r} must be the name of a folder.")
    content = {**content, "recipe": str(Path(path).parent / str(content["recipe"]))}
    return kind(**{**content, **{name: value for name, value in given.items() if value is not None}})


def read_comparison(path: str, **given: Any) -> "Comparison":
    """The comparison that a YAML file describes; fields that are given, and not None, win."""
    return read_spec(Comparison, path, read_recipe(Path(path)), given)


def check_search(place: str, search: Any, known: Collection[str], fixed: bool = False) -> dict[str, Any]:
    """Return {known field: list of different values}, or with `fixed` one value, or refuse it; `place` says where."""
    if not isinstance(search, dict):
        raise ValueError(f"{place}: {search!r} must map fields to lists of values, e.g. `learning_rate: [0.1, 0.2]`.")
    for name, values in search.items():
        if name not in known or is_secret(name):
            raise ValueError(
                f"{place}: {name!r} cannot be set here; name a field of the model or of the training, e.g."
                " learning_rate."
            )
        if isinstance(values, list):
            search = {**search, name: [plain(value) for value in values]}
        if not different(search[name]) and (isinstance(values, list) or not fixed):
            raise ValueError(f"{place}: {name}={values!r} must be a list of different values.")
    return search


def different(values: Any) -> bool:
    """Whether these are values of a list, no two of them equal."""
    if not isinstance(values, list) or not values:
        return False
    return len({float(value) if is_number(value) else json.dumps(value) for value in values}) == len(values)


def plain(value: Any) -> Any:
    """Text as the number or truth value that it writes; YAML's own rules take 1e-3 for text.

    >>> plain("1e-3"), plain("True"), plain("ml")
    (0.001, True, 'ml')
    """
    try:
        return json.loads(value.lower()) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def flag_names(overrides: list[str]) -> set[str]:
    """The fields that such arguments set."""
    return {text[2:].split("=")[0].replace("-", "_") for text in overrides if text.startswith("--")}


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
        train_k: Train losses that depend on K for this one only, and report them at all; default: for each by itself.
        tune_seed: Seed of the trainings that tune; not one of those reported.
        baseline: The loss that the others are compared with.
        more_data: For glyphs: train the baseline also on so many times the images, as a yardstick; 0 for none.
        balances: Balances that are measured besides 0, among `scope.GRID`, or `"auto"`; by default none.
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
    train_k: float | None = None
    tune_seed: int = 1000
    baseline: str = "ce"
    more_data: int = 0
    balances: list[Any] = field(default_factory=list)
    output_dir: str = "runs/compare"
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._check_searches()
        if not isinstance(self.balances, list) or not all(each in (*GRID, "auto") for each in self.balances):
            raise ValueError(f"balances={self.balances!r} must be a list, each among {[*GRID, 'auto']}.")
        if not different(self.k):
            raise ValueError(f"k={self.k!r} must be a list of different sizes, e.g. `k: [2, 3, 5, 10]`.")
        self.k = sorted(check_k(k) for k in self.k)
        for name in ("tune_k", "train_k"):
            if getattr(self, name) not in (None, *self.k):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of k={self.k}, or left out for each.")
        for name, least in (("budget", 1), ("seeds", 1), ("tune_seed", 0), ("more_data", 0)):
            check_whole(name, getattr(self, name), least)
        if self.tune_seed < self.seeds:
            raise ValueError(f"tune_seed={self.tune_seed} must not be a seed that is reported, 0 to {self.seeds - 1}.")
        self.arguments  # noqa: B018  (refuses a recipe that cannot be read)

    def _check_searches(self) -> None:
        """Refuse losses that are unknown, and fields that they, or the command line, cannot set."""
        if not isinstance(self.losses, dict) or not self.losses:
            raise ValueError("losses: name at least one loss and what is searched, e.g. `losses: {ce: {}, avgk: {}}`.")
        known = {}
        for name, own in self.losses.items():
            self.losses = {**self.losses, name: own or {}}
            objective = str(own.get("objective", name) if isinstance(own, dict) else name)
            if objective not in LOSSES or not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(
                    f"losses: {name!r} is unknown; choose among {', '.join(LOSSES)}, or set `objective:`."
                )
            blocks = model_arguments(objective), AvgKTrainingArguments
            known[name] = {item.name for block in blocks for item in fields(block)} - SET_HERE
        of_all = set.intersection(*known.values())
        self.shared = check_search("shared", self.shared, of_all)
        for name, own in self.losses.items():
            self.losses[name] = check_search(name, own, known[name] | {"objective"}, fixed=True)
            check_combinations(name, self.searched(name).values())
        check_choice("baseline", self.baseline, self.losses)
        flags = flag_names(self.overrides)
        for name in flags & {*SET_HERE, *self.shared, *(name for own in self.losses.values() for name in own)}:
            raise ValueError(f"--{name} is set by the comparison itself; change it in its file.")
        for name in flags & every_hyperparameter() - of_all:
            raise ValueError(f"--{name} belongs to some of the losses only; set it in the file, for each of them.")

    def objective(self, loss: str) -> str:
        """The objective that a loss of the comparison trains with."""
        return str(self.losses[loss].get("objective", loss))

    def loss(self, loss: str) -> type[Loss]:
        """The class of a loss of the comparison."""
        return LOSSES[self.objective(loss)]

    @functools.cached_property
    def arguments(self) -> Arguments:
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

    @property
    def first_k(self) -> float:
        """The K at which losses are tuned, or the first of them."""
        return self.tune_k or self.k[0]

    def epochs(self, values: dict[str, Any]) -> float:
        """The epochs of a training with these hyperparameters."""
        return float(values.get("num_train_epochs", self.arguments[2].num_train_epochs))

    def searched(self, loss: str) -> dict[str, list[Any]]:
        """All that is searched for a loss, its own values before those that are shared."""
        return {
            name: values for name, values in {**self.shared, **self.losses[loss]}.items() if isinstance(values, list)
        }

    def configurations(self, loss: str) -> list[dict[str, Any]]:
        """What a loss is tuned over: `budget` of its combinations, drawn the same every time.

        Each next one is that whose values, alone and in pairs, were drawn least for their number: with few draws, too,
        every value of every field is tried about equally often.
        """
        grid = self.searched(loss)
        fixed = {name: value for name, value in self.losses[loss].items() if name not in {*grid, "objective"}}
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


@dataclass(frozen=True)
class Run:
    """One training of the comparison."""

    phase: str  # "tune", "final", or "more_data"
    loss: str  # its name in the comparison
    k: float | None  # None for a loss that does not depend on it
    values: dict[str, Any] | None  # hyperparameters; None while they are not chosen yet
    seed: int  # of initialisation, batch order and generated data
    ks: tuple[float, ...] = ()  # it is reported for: of each, the weights of the epoch that is best on validation
    times: int = 1  # as many training images as the recipe's

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in (self.values or {}).items())
        return f"{self.phase} {self.loss}{'' if self.k is None else f' K={k_key(self.k)}'} seed {self.seed} ({values})"


def run_path(comparison: Comparison, run: Run) -> Path:
    """The file of a run's results; its name holds a digest of everything that decides on them."""
    what = {"recipe": comparison.fields, "overrides": comparison.overrides}
    what["objective"] = comparison.objective(run.loss)
    what |= {"all_k": comparison.k, "run": [run.phase, run.k, run.values, run.seed, list(run.ks)]}
    if run.times > 1:
        what["times"] = run.times
    if comparison.balances:
        what["balances"] = comparison.balances
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
    """The trainings that tune a loss for one K; none where there is nothing to choose."""
    if not comparison.searched(loss):
        return []
    return [Run("tune", loss, k, values, comparison.tune_seed) for values in comparison.configurations(loss)]


def choose(comparison: Comparison, loss: str, k: float) -> dict[str, Any] | None:
    """The hyperparameters with the highest validation accuracy for a K, or None while trainings are missing."""
    at = k if comparison.tune_k is None else comparison.tune_k
    runs = tuning_runs(comparison, loss, at if comparison.loss(loss).needs_k else None)
    found = [finished(comparison, run) for run in runs]
    if any(result is None for result in found):
        return None
    if not runs:
        return comparison.configurations(loss)[0]
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


def plan(comparison: Comparison) -> list[Run]:
    """All trainings in the order in which they are done; those not chosen yet have no values."""
    runs = [
        run
        for loss in comparison.losses
        for k in comparison.tuned_ks(loss)
        for run in tuning_runs(comparison, loss, k)
    ]
    chosen = {loss: {k: choose(comparison, loss, k) for k in comparison.k} for loss in comparison.losses}
    if comparison.more_data and comparison.on_glyphs:  # first, because it takes longest
        loss, at = comparison.baseline, comparison.first_k
        values = chosen[loss][at]
        if values is not None:
            epochs = comparison.epochs(values) / comparison.more_data**0.5  # more steps in all
            values = {**values, "num_train_epochs": max(round(epochs), 1)}
        k = at if comparison.loss(loss).needs_k else None
        runs.append(Run("more_data", loss, k, values, comparison.tune_seed, tuple(comparison.k), comparison.more_data))
    for seed in range(comparison.seeds):  # seed by seed, so that data are generated once
        for loss, of_k in chosen.items():
            at = comparison.train_k if comparison.loss(loss).needs_k else None
            if at is not None:
                runs.append(Run("final", loss, at, of_k[at], seed, tuple(comparison.k)))
            elif comparison.loss(loss).needs_k:
                runs += [Run("final", loss, k, values, seed, (k,)) for k, values in of_k.items()]
            else:  # one training for all K with the same hyperparameters
                groups: dict[str, list[float]] = {}
                for k, values in of_k.items():
                    groups.setdefault(json.dumps(values), []).append(k)
                runs += [Run("final", loss, None, of_k[ks[0]], seed, tuple(ks)) for ks in groups.values()]
    return runs


def num_epochs(comparison: Comparison, run: Run) -> float:
    """The epochs of a run, counted in the recipe's images; the mean of what is searched while nothing is chosen."""
    if run.values is not None:
        return comparison.epochs(run.values) * run.times
    return mean(map(comparison.epochs, comparison.configurations(run.loss))) * run.times**0.5
