"""`avgk plot`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import refuse_link, write_text
from ..shell import printable
from .options import ALLOW_OUTSIDE, check_pictures

HELP = "draw set sizes, accuracy against K and contact sheets of runs"
SHEET_IMAGES = 480
CURVE_KS = range(1, 21)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished `avgk train` runs")
    parser.add_argument("--out", default="runs/plots", help="folder for the pictures, PNG and SVG (%(default)s)")
    parser.add_argument("--allow-outside", **ALLOW_OUTSIDE)


def run(args: argparse.Namespace) -> None:
    check_pictures(True)
    for path in plot_runs(args.runs, args.out, args.allow_outside):
        print(printable(path))


def plot_runs(runs: Sequence[str | Path], out: str | Path, allow_outside: bool = False) -> list[Path]:
    """All pictures of one or more runs of `avgk train`, from their models and their data.

    Thresholds for K = 1 to the largest calibrated one, 20 at most, are computed in memory, without a change to the
    runs. The accuracy curve's numbers are written beside it; that of a single run has top-K beside its sets.

    Args:
        runs: Folders of runs.
        out: Folder for the pictures, PNG and SVG.
        allow_outside: As in `load_splits`; what a run recorded of it does not count.

    Returns:
        The files that were written.
    """
    from ..model_card import read_results
    from ..modeling import AvgKForImageClassification
    from ..study.plots import accuracy_curve, by_shot, in_both_formats, set_size_histogram
    from ..study.seeds import find_runs

    refuse_link(out)
    runs, out = find_runs(runs), Path(out)
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run).strip("/").replace("/", "-") for run in runs]
    loaded: dict[str, Any] = {}
    sizes, curves, top, files = {}, {}, {}, []
    for name, run in zip(names, runs, strict=True):
        results = read_results(run, "data")
        if "set_sizes" not in results:
            raise ValueError(f"{run} was not evaluated on a test split, so there are no set sizes to show.")
        data = data_of(run, results)
        key = json.dumps(vars(data), sort_keys=True)
        if key not in loaded:
            loaded[key] = _splits(data, allow_outside)
        validation, test = loaded[key]
        model = AvgKForImageClassification.from_pretrained(run)
        sizes[name] = results["set_sizes"]["all"]
        title = f"{name}, {accuracy_of(results)}"
        files += _sheets(model, test, out / f"contact_sheet_{name}", title)
        if shots := by_shot(results["set_sizes"]):
            files += in_both_formats(set_size_histogram, out / f"set_sizes_by_shot_{name}", shots, title=title)
        curves[name], top = _curves(model, validation, test)
    about = f"{title}. " if len(runs) == 1 else ""
    sizes = sizes if len(runs) > 1 else {"": sizes[name]}  # the title names it
    files += in_both_formats(set_size_histogram, out / "set_sizes", sizes, title=f"{about}Set sizes on test")
    lines = {name: {k: {"mean": v, "half_width": None} for k, v in curve.items()} for name, curve in curves.items()}
    how = {"title": "Accuracy on test by K"}
    if len(runs) == 1:
        how["title"] = f"{title}. What larger sets reach"
        lines, how["limits"] = {"sets of K classes on average": lines[name]}, {"top-K: K for every image": top}
    files += in_both_formats(accuracy_curve, out / "accuracy_against_k", lines, **how)
    files.append(out / "accuracy_against_k.json")
    write_text(files[-1], json.dumps(curves, indent=2) + "\n")
    return files


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
            f"results.json names the data {data.dataset!r}, and there is no such folder here: go where it is, or name"
            " its path when you train, `AvgKTrainer(..., dataset_name=PATH)`."
        )
    columns = data.dataset_config, data.image_column, data.label_column, data.glyphs_seed
    taken = data.validation_per_class, data.split_seed, False
    splits = load_splits(data.dataset, *columns, *taken, allow_outside, allow_new_classes=True)
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


def accuracy_of(results: dict[str, Any]) -> str:
    """What a picture's title says of a run."""
    from ..sets import k_key

    return f"K = {k_key(results['k'])}: average-K accuracy {100 * results['test']['average_k_accuracy']:.1f}% on test"


def _sheets(model: Any, test: Any, stem: Path, title: str) -> list[Path]:
    from ..study.plots import contact_sheet, in_both_formats

    *shown, scores = sheet_of(model, test)
    title = f"{title}. Predicted sets, from clear to hopeless"
    return in_both_formats(contact_sheet, stem, *shown, scores=scores, title=title)


def sheet_of(model: Any, dataset: Any) -> tuple[Any, list[list[int]], list[int], list[str], list[list[float]]]:
    """What `contact_sheet` shows of a calibrated model: images of one split of `load_splits`, sets, labels, names.

    The last part are the scores of the sets' classes. At most `SHEET_IMAGES` are looked at, spread over the split.
    """
    import numpy as np
    import torch
    from datasets import Image
    from huggingface_hub.utils import tqdm

    from ..calibration import Calibration
    from ..data import prepare
    from ..questions import Question

    chosen = np.linspace(0, len(dataset) - 1, min(SHEET_IMAGES, len(dataset))).astype(int)
    sample = dataset.select(chosen)
    answer = Calibration.of(model.config).answer(Question(min_size=1))
    prepared, sets, scores = prepare(sample, model.config), [], []
    for start in tqdm(range(0, len(sample), 64), desc="contact sheet", unit="batch", disable=None):
        found = model.scores(torch.stack(prepared[start : start + 64]["pixel_values"]))
        sets += answer.classes(found)
        scores += [row[classes].tolist() for row, classes in zip(found, sets[start:], strict=True)]
    images = sample.cast_column("image", Image(decode=False))["image"]
    return images, sets, list(sample["label"]), sample.features["label"].names, scores


def _curves(model: Any, validation: Any, test: Any) -> tuple[dict[float, float], dict[float, float]]:
    """{K: average-K accuracy on test}, and {K: top-K accuracy on test}."""
    from ..calibration import Calibration
    from ..evaluation import evaluate
    from ..sets import k_key

    last = max(Calibration.of(model.config).ks, default=CURVE_KS[-1])
    ks = [k for k in CURVE_KS if k <= last and k < model.config.num_labels]
    evaluate(model, validation, ks, calibrate=True)  # its own balance stays what it is
    metrics = evaluate(model, test, ks)
    names = {k: "" if k == model.config.k else f"@{k_key(k)}" for k in ks}
    sets, top = ({k: metrics[f"{kind}_accuracy{names[k]}"] for k in ks} for kind in ("average_k", "topk"))
    return sets, top
