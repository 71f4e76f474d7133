"""`avgk calibrate`."""

import argparse
from pathlib import Path
from typing import Any

from ..files import new_file, refuse_link, replacing
from ..shell import printable
from .evaluate import is_first_process, measure, print_metrics, read_split, shared_arguments

HELP = "compute a model's thresholds on validation images"


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments(parser, "validation")
    sizes = "set sizes besides the model's own; replace those recorded before"
    parser.add_argument("--k", type=float, nargs="+", default=[], help=sizes)
    levels = "coverage levels to compute thresholds for (0.9 0.95 0.99)"
    parser.add_argument("--coverage", type=float, nargs="+", metavar="C", help=levels)
    restricted = "sets hold only the dataset's classes, and K counts only these"
    parser.add_argument("--classes-from-dataset", action="store_true", help=restricted)
    kept = "leave the heads as training chose them, so that coverage holds exactly on images like these"
    parser.add_argument("--keep-heads", action="store_true", help=kept)
    parser.add_argument("--plot", metavar="FILE", help="picture of size against coverage, PNG or SVG")
    parser.add_argument("--out", help="folder for the calibrated model (default: write to MODEL)")
    parser.add_argument("--push", metavar="REPO", help="upload the folder of --out to the Hub")


def run(args: argparse.Namespace) -> None:
    from ..calibration import Calibration
    from ..classifiers import best_device, load_classifier, write_thresholds
    from ..hub import push_folder
    from ..scope import promise

    if not args.out and (args.push or not Path(args.model).is_dir()):
        raise ValueError("name a folder for the calibrated model with --out.")
    refuse_link(args.out or args.model)  # now, and not when all is computed
    model = load_classifier(args.model).to(best_device())
    split, before = read_split(args), _recorded(model.config)
    how = {"classes_from_dataset": args.classes_from_dataset, "keep_heads": args.keep_heads}
    metrics = measure(model, split, args, calibrate=True, **how)
    if not is_first_process():
        return
    if args.out:
        save_classifier(model, args.out, metrics, args.push)
    else:
        write_thresholds(model, args.model)
    print_metrics(metrics, args.json)
    if args.plot:
        from ..study.plots import tradeoff_curve

        tradeoff_curve({Path(args.model).resolve().name: Calibration.of(model.config).curve}, args.plot)
    if not args.json:
        print(f"thresholds written to {args.out or args.model}")
        _say_what_changed(before, _recorded(model.config), None if args.out else Path(args.model))
        if (approximate := promise(Calibration.of(model.config))) is not None:
            print(approximate)
    if args.push:
        print(push_folder(args.out, args.push))


def _recorded(config: Any) -> dict[str, dict[str, Any]]:
    """What a config can be asked for."""
    from ..calibration import Calibration
    from ..conformal import describe_coverage
    from ..sets import k_key

    found = Calibration.of(config)
    return {"K": dict.fromkeys(map(k_key, found.ks)), "coverage": describe_coverage(found.coverage)}


def _say_what_changed(before: dict[str, dict], after: dict[str, dict], folder: Path | None) -> None:
    """The coverages of a calibration, what it replaced, and what in the model's folder is older than it."""
    for level, how in after["coverage"].items():
        print(printable(f"coverage {level}: {how}"))
    for name, found in before.items():
        gone = [key for key in found if key not in after[name]]
        if gone:
            print(f"{name} = {printable(', '.join(gone))} of an earlier calibration: not recorded any more")
    older = [name for name in ("README.md", "onnx/model.onnx") if folder and (folder / name).is_file()]
    if older:
        print(f"older than these thresholds: {', '.join(older)} (`avgk card`, `avgk export` write them anew)")


def save_classifier(model: Any, folder: str | Path, metrics: dict[str, float], repo: str | None = None) -> None:
    """Save a calibrated classifier of any class with its image processor, the pipeline and a card.

    Args:
        model: The classifier.
        folder: Where to.
        metrics: What the calibration measured.
        repo: Where it will be on the Hub, if that is known.
    """
    from ..calibration import Calibration
    from ..classifiers import carry_code, image_processor, write_thresholds
    from ..model_card import render_card
    from ..modeling import AvgKForImageClassification

    folder = Path(folder)
    with replacing(folder) as new:
        model.save_pretrained(new)
        write_thresholds(model, new)
        if not isinstance(model, AvgKForImageClassification):
            image_processor(model).save_pretrained(new)
            carry_code(new)
    dataset = Calibration.of(model.config).source.get("dataset")
    card = render_card(repo or folder.name, model.config, {"validation": metrics}, {}, dataset, calibrated_only=True)
    with new_file(folder / "README.md") as new:
        card.save(new)
