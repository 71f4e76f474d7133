"""`avgk plot`."""

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..files import refuse_link, write_text
from ..shell import printable
from .options import ALLOW_OUTSIDE, check_pictures

HELP = "draw set sizes, accuracy against K and contact sheets of runs"
CURVE_KS = range(1, 21)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished `avgk train` runs")
    parser.add_argument("--out", default="runs/plots", help="folder for the pictures, PNG and SVG (%(default)s)")
    parser.add_argument("--allow-outside", **ALLOW_OUTSIDE)


def run(args: argparse.Namespace) -> None:
    check_pictures(True)
    if Path(args.out).suffix.lower() in (".png", ".svg", ".pdf", ".jpg"):
        raise ValueError(f"--out {args.out}: there are several pictures, so name a folder for them.")
    for path in plot_runs(args.runs, args.out, args.allow_outside):
        print(printable(path), flush=True)


def plot_runs(runs: Sequence[str | Path], out: str | Path, allow_outside: bool = False) -> Iterator[Path]:
    """All pictures of one or more runs of `avgk train`, from their models and their data.

    Thresholds for K = 1 to the largest calibrated one, 20 at most, are computed in memory, without a change to the
    runs. The accuracy curve's numbers are written beside it; that of a single run has top-K beside its sets.

    Args:
        runs: Folders of runs.
        out: Folder for the pictures, PNG and SVG.
        allow_outside: As in `load_splits`; what a run recorded of it does not count.

    Yields:
        The files, as they are written.
    """
    from ..confusions import Listed
    from ..modeling import AvgKForImageClassification
    from ..results import read_results
    from ..sets import k_key
    from ..study.plots import accuracy_curve, by_shot, in_both_formats, set_size_histogram
    from ..study.seeds import find_runs

    refuse_link(out)
    runs, out = find_runs(runs), Path(out)
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run).strip("/").replace("/", "-") for run in runs]
    loaded: dict[str, Any] = {}
    sizes, curves, top = {}, {}, {}
    for name, run in zip(names, runs, strict=True):
        results = read_results(run, "data")
        if "set_sizes" not in results:
            remedy = (
                "train with `test_per_class: 5`, which keeps test images aside, where the data have no split of them"
                ' (in Python `trainer.evaluate(test, metric_key_prefix="test")` before `trainer.save_model()`)'
            )
            raise ValueError(f"{run} was not evaluated on a test split, so there is nothing to draw: {remedy}.")
        data = data_of(run, results)
        key = json.dumps(vars(data), sort_keys=True)
        if key not in loaded:
            loaded[key] = _splits(data, allow_outside)
        validation, test = loaded[key]
        model = AvgKForImageClassification.from_pretrained(run)
        listed = Listed(model.config)
        curves[name], top = _curves(model, validation, test, listed)
        sizes[f"{name}, K = {k_key(listed.k)}"] = listed.size_counts()["all"]
        title = f"{name}, {accuracy_of(listed)}"
        yield from in_both_formats(partial(draw_sheet, listed, title), out / f"contact_sheet_{name}")
        if shots := by_shot(listed.size_counts()):
            yield from in_both_formats(set_size_histogram, out / f"set_sizes_by_shot_{name}", shots, title=title)
    # where there is one, the title names it
    about, sizes = ("Set sizes on test", sizes) if len(runs) > 1 else (title, {"": next(iter(sizes.values()))})
    yield from in_both_formats(set_size_histogram, out / "set_sizes", sizes, title=about)
    lines = {name: {k: {"mean": v, "half_width": None} for k, v in curve.items()} for name, curve in curves.items()}
    how = {"title": "Accuracy on test by K"}
    if len(runs) == 1:
        how["title"] = f"{title}. What larger sets reach"
        lines, how["limits"] = {"sets of K classes on average": lines[name]}, {"top-K: K for every image": top}
    yield from in_both_formats(accuracy_curve, out / "accuracy_against_k", lines, **how)
    write_text(out / "accuracy_against_k.json", json.dumps(curves, indent=2) + "\n")
    yield out / "accuracy_against_k.json"


def data_of(run: Path, results: dict[str, Any]) -> Any:
    """The data block that results.json recorded, by a recipe or by `AvgKTrainer(dataset_name=...)`."""
    from ..recipes import DataArguments

    known = {name: value for name, value in results["data"].items() if name in DataArguments.__dataclass_fields__}
    if "dataset" not in known:
        raise ValueError(f"{run}: results.json does not name the data: say `AvgKTrainer(dataset_name=...)` and train.")
    return DataArguments(**known)


def _splits(data: Any, allow_outside: bool) -> tuple[Any, Any]:
    """The validation and test images of a run, without those that its training left out."""
    from ..data import load_splits, skip_bad_images

    if data.dataset != "glyphs" and "/" not in data.dataset and not Path(data.dataset).exists():
        raise FileNotFoundError(
            f"results.json names the data {data.dataset!r}, and there is no such folder here: go to the folder where"
            " the training was started, or name a whole path in it (`dataset:`, in Python `dataset_name=`)."
        )
    same = ("image_column", "label_column", "validation_per_class", "test_per_class", "split_seed")
    how = {name: getattr(data, name) for name in same} | {"config_name": data.dataset_config, "seed": data.glyphs_seed}
    splits = load_splits(data.dataset, **how, allow_outside=allow_outside, allow_new_classes=True)
    names = data.validation_split, data.test_split
    for name in names:
        if name not in splits:
            raise ValueError(
                f"the dataset {data.dataset!r} has no split {name!r}, only {list(splits)}: a run from Python records"
                " how validation was taken from train where `load_splits(..., validation_per_class=...)` took it."
            )
    if data.on_bad_image != "skip":
        return splits[names[0]], splits[names[1]]
    return tuple(skip_bad_images(splits[name], name, report=False)[0] for name in names)


def accuracy_of(listed: Any) -> str:
    """What a picture's title says of sets that were collected on test."""
    balance = f", balance {listed.calibration.balance:g} (lowers scores)" if listed.calibration.balance else ""
    return f"K = {listed.k:g}{balance}: average-K accuracy {100 * listed.accuracy:.1f}% on test"


def draw_sheet(listed: Any, title: str, path: Path) -> None:
    """The contact sheet of sets that were collected, spread evenly from clear to hopeless."""
    from ..study.plots import contact_sheet

    images, (sets, scores) = listed.stored(), zip(*map(listed.named, range(len(listed.sizes))), strict=True)
    how = {"scores": scores, "title": f"{title}. Predicted sets, from clear to hopeless"}
    how["lambda_val"] = listed.answer.lambda_val
    contact_sheet(images, sets, listed.labels.tolist(), listed.names, path, **how)


def _curves(model: Any, validation: Any, test: Any, listed: Any) -> tuple[dict[float, float], dict[float, float]]:
    """{K: average-K accuracy on test}, and {K: top-K accuracy on test}; the sets are collected in the same pass."""
    from ..calibration import Calibration
    from ..evaluation import evaluate
    from ..sets import k_key

    recorded = Calibration.of(model.config).ks
    last = max(recorded, default=CURVE_KS[-1])
    ks = sorted({k for k in CURVE_KS if k <= last and k < model.config.num_labels} | {*recorded})
    evaluate(model, validation, ks, calibrate=True)  # its own balance stays what it is
    metrics = evaluate(model, test, ks, listed=[listed])
    names = {k: "" if k == model.config.k else f"@{k_key(k)}" for k in ks}
    sets, top = ({k: metrics[f"{kind}_accuracy{names[k]}"] for k in ks} for kind in ("average_k", "topk"))
    return sets, {k: share for k, share in top.items() if float(k).is_integer()}
