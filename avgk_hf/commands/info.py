"""`avgk info`."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..shell import printable
from .options import writes_card

HELP = "say what a model is, what it can be asked, and how well it does"
MOST_READ = 1_000_000  # characters of a card
SHOWN = ("average_k_accuracy", "mean_set_size", "top1_accuracy", "few_shot_accuracy")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a model, ours or any image classifier")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> None:
    from ..checks import model_folder

    name, folder = args.model, model_folder(args.model) or Path(args.model)
    from ..classifiers import load_model_config

    found = describe(load_model_config(name), folder)
    print(json.dumps({"model": name, **found}, indent=2) if args.json else _as_text(name, found))


def describe(config: Any, folder: Path) -> dict[str, Any]:
    """All that config and results of a model say, in plain values; no weights are loaded.

    Args:
        config: Of any class.
        folder: Where results, card and graphs are, if it is one.
    """
    from ..calibration import Calibration
    from ..conformal import describe_coverage
    from ..data.classes import model_names
    from ..scope import promise
    from ..sets import k_key

    calibration, ours = Calibration.of(config), hasattr(config, "objective")
    cfg, classes = getattr(config, "pretrained_cfg", None) or {}, config.architectures or [config.model_type]
    about = {
        "class": "AvgKForImageClassification" if ours else ", ".join(map(str, classes)),
        "backbone": getattr(config, "architecture", None) or config.model_type,
        "input": cfg.get("input_size") or getattr(config, "image_size", None),
        "objective": config.objective if ours else None,
        "hyperparameters": config.hyperparameters if ours else {},
        "k": calibration.k if ours or calibration.ks else None,
        "score": calibration.score,
        "own_balance": calibration.balance,
        "test_time_augmentation": getattr(config, "test_time_augmentation", "none"),
    }
    heads = {k_key(k): calibration.head(k) for k in calibration.ks}
    asked = {
        "k": calibration.ks,
        "coverage": describe_coverage(calibration.coverage) if calibration.levels() else {},
        "heads": heads if getattr(config, "sccp_head", False) else {},
        "classes": None if calibration.classes is None else len(calibration.classes),
        "balance": calibration.balances if calibration.ks else [],
    }
    source = {name: value for name, value in calibration.source.items() if name != "classes"}
    results, stale = _results(config, calibration, folder)
    counts = getattr(config, "train_counts", None)
    return {
        "classes": model_names(config),
        "train_counts": counts,
        **about,
        "can_be_asked": asked,
        "calibrated_on": source if calibration.ks else None,
        "promise": promise(calibration),
        "results": results,
        "stale": stale,
    }


def _results(config: Any, calibration: Any, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What results.json says, and which files beside the model are of other thresholds than it has now."""
    from ..checks import read_json
    from ..results import of_other_thresholds, read_results
    from ..sets import k_key

    results, stale = {}, []
    own = {k_key(k): calibration.threshold(k) for k in calibration.ks}
    first = k_key(calibration.k) if calibration.ks else None
    if (folder / "results.json").is_file():
        found = read_results(folder)
        results = {split: found[split] for split in ("validation", "test") if split in found}
        old = [split for split, metrics in results.items() if of_other_thresholds(config, {split: metrics})]
        if old:
            again = f"`avgk evaluate MODEL DATASET --out {folder / 'results.json'}` measures them anew"
            stale.append(f"{' and '.join(old)} above ({again})")
    card = folder / "README.md"
    if own and card.is_file():
        with card.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_READ)
        if "lambda_val" in text and f"{own[first]:.6f}" not in text:
            stale.append(f"README.md ({writes_card(folder)})")
    if (folder / "onnx" / "export.json").is_file():
        stored = read_json(folder / "onnx" / "export.json").get("thresholds")
        if stored != own:
            stale.append("onnx (`avgk export`)")
    return results, stale


def _as_text(name: str, found: dict[str, Any]) -> str:
    """The same for a person: a line for each, what is missing left out."""
    asked, source, ks = found["can_be_asked"], found["calibrated_on"], found["can_be_asked"]["k"]
    counts, classes = found["train_counts"], found["classes"]
    some = ", ".join(classes[:3]) + ", ..." * (len(classes) > 3)
    trained = f"; {sum(counts):,} training images, {min(counts):,} to {max(counts):,} each" if counts else ""
    hyper = "".join(f", {name} {value}" for name, value in found["hyperparameters"].items())
    lines = {
        "model": f"{name} ({found['class']})",
        "classes": f"{len(classes):,} ({some}){trained}",
        "backbone": f"{found['backbone']}, input {found['input']}",
        "objective": f"{found['objective']}, K = {found['k']:g}{hyper}" if found["objective"] else "",
        "mirrored": "scores are means over an image and its mirror image"
        * (found["test_time_augmentation"] == "flip"),
        "average size": "",
        "coverage": "; ".join(f"{level} ({how})" for level, how in asked["coverage"].items()),
        "heads": ", ".join(f"K = {k}: {head}" for k, head in asked["heads"].items()),
        "balance": "",
        "sets hold": f"{asked['classes']:,} of the classes only" if asked["classes"] else "",
    }
    if len(asked["balance"]) > 1:
        known = ", ".join(f"{each:g}" for each in asked["balance"])
        lines["balance"] = f"--balance {known} (without --balance it is {found['own_balance']:g})"
    if ks:
        known = ", ".join(f"{k:g}" for k in ks)
        several = f"--k {ks[0]:g} to {ks[-1]:g} (calibrated: {known}; without --k it is {found['k']:g})"
        lines["average size"] = several if len(ks) > 1 else f"--k {known} (calibrated for no other)"
    lines["calibrated"] = "no: it names one class, and no sets, before `avgk calibrate MODEL DATASET --k 1 2 5`"
    if source:
        where = " ".join(str(source[part]) for part in ("dataset", "split") if source.get(part))
        images = f"{source.get('num_examples', 'unknown')} images"
        lines["calibrated"] = f"on {images}{f' of {where}' if where else ''}, {source.get('date', 'date unknown')}"
    lines["promise"] = found["promise"] or ""
    for split, metrics in found["results"].items():
        shown = {metric: metrics[metric] for metric in SHOWN if metrics.get(metric) is not None}
        forms = {metric: f"{value:.2f}" if "size" in metric else f"{value:.2%}" for metric, value in shown.items()}
        lines[split] = ", ".join(
            f"{metric.replace('_k_', '-K ').replace('_', ' ')} {form}" for metric, form in forms.items()
        )
    lines["out of date"] = ", ".join(found["stale"])
    return "\n".join(f"{label:14}{printable(text)}" for label, text in lines.items() if text)
