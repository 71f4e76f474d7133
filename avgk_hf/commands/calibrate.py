"""`avgk calibrate`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..files import refuse_link
from ..shell import printable
from .evaluate import (
    is_first_process,
    measure,
    name_of,
    print_metrics,
    quiet_unless_first,
    read_split,
    say_split,
    shared_arguments,
)
from .options import balance, check_model, check_pictures, labels_of, say_left_out, say_written, writes_card

HELP = "compute a model's thresholds on validation images"


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments(parser, "validation")
    sizes = "set sizes besides the model's own; replace those recorded before"
    parser.add_argument("--k", type=float, nargs="+", default=[], help=sizes)
    levels = "coverage levels to compute thresholds for (0.9 0.95 0.99)"
    parser.add_argument("--coverage", type=float, nargs="+", metavar="C", help=levels)
    restricted = "sets hold only the dataset's classes, and K counts only these"
    parser.add_argument("--classes-from-dataset", action="store_true", help=restricted)
    own = "0: every image counts alike, 1: every class; or auto. The model's own from now on (what it was, at first 0)"
    parser.add_argument("--balance", type=balance, metavar="B", help=own)
    parser.add_argument("--give-up", type=float, default=0.5, metavar="P", help="points that auto may cost (0.5)")
    parser.add_argument("--select-by", default="micro", help="what the best head is best in: micro or macro (micro)")
    known = "how frequent classes are: a dataset with a split train, or CSV or JSON of classes and numbers"
    parser.add_argument("--prevalence", metavar="DATASET|FILE", help=f"{known} (the training's)")
    pictures = "picture of size against coverage, PNG or SVG; beside it FILE_balance, what balances are worth"
    parser.add_argument("--plot", metavar="FILE", help=pictures)
    kept = "leave the heads as training chose them, so that coverage holds exactly on images like these"
    parser.add_argument("--keep-heads", action="store_true", help=kept)
    views = "flip: from now on scores are means over an image and its mirror image, at twice the cost (what it was)"
    parser.add_argument("--test-time-augmentation", choices=("none", "flip"), help=views)
    parser.add_argument("--out", help="folder for the calibrated model (default: write to MODEL)")
    parser.add_argument("--push", metavar="REPO", help="upload the folder of --out to the Hub")


def run(args: argparse.Namespace) -> int:
    if refuse_link(args.out or args.model).is_file():  # now, and not when all is computed
        raise NotADirectoryError(f"--out {args.out} is a file: name a folder for the calibrated model.")
    check_model(args.model, args.k, calibrated=False, dataset=args.dataset, levels=args.coverage or ())
    if not args.out and (args.push or not Path(args.model).is_dir()):
        raise ValueError("name a folder for the calibrated model with --out.")
    check_pictures(args.plot)
    quiet_unless_first()
    from ..calibration import Calibration
    from ..classifiers import best_device, load_classifier, write_thresholds
    from ..data.classes import name_classes
    from ..hub import push_folder
    from ..model_card import save_classifier
    from ..records import AUGMENTATION
    from ..results import renew_results
    from ..scope import promise

    model = load_classifier(args.model).to(best_device())
    split, before = read_split(args, model.config), _recorded(model.config)
    if args.test_time_augmentation:
        if not hasattr(model.config, AUGMENTATION):
            raise ValueError(
                f"--test-time-augmentation is for models of this package, and {args.model} is a"
                f" {type(model).__name__}: leave it out."
            )
        model.config.test_time_augmentation = args.test_time_augmentation
    how = {"per_class": args.per_class, "give_up": args.give_up, "select_by": args.select_by}
    how |= {"classes_from_dataset": args.classes_from_dataset, "keep_heads": args.keep_heads}
    if args.prevalence:
        how["prevalence"] = _prevalence(args, model.config)
    if args.out and args.labels_by_position and "label" in split.features:  # which not every stream knows
        name_classes(model.config, split.features["label"].names)
    metrics, *left_out = measure(model, split, args, calibrate=True, **how)
    if not is_first_process():
        return 0
    if args.out:
        save_classifier(model, args.out, metrics, args.push)
    else:
        write_thresholds(model, args.model)
        renew_results(Path(args.model), name_of(args), str(split.split or args.split), metrics)
    calibration = Calibration.of(model.config)
    say_split(split, args, calibration.balance)
    print_metrics(metrics, args, getattr(model.config, "k", None))
    if args.plot:
        _draw(calibration, args)
    if not args.json:
        _say_balances(calibration, args)
        print(f"thresholds written to {args.out or args.model}; without --k it answers for K = {calibration.k:g}")
        _say_what_changed(before, _recorded(model.config), None if args.out else Path(args.model))
        if (approximate := promise(Calibration.of(model.config))) is not None:
            print(approximate)
    if args.push:
        print(push_folder(args.out, args.push))
    return say_left_out(*left_out)


def _prevalence(args: argparse.Namespace, config: Any) -> list[float]:
    """How frequent the model's classes are, from the training images of a dataset or a file of numbers."""
    from ..data import align_labels, class_counts, load_splits
    from ..data.classes import read_numbers
    from ..scores import smoothed_prevalence

    if Path(args.prevalence).is_file():
        return read_numbers(args.prevalence, config, labels_of(args))
    splits = load_splits(args.prevalence, allow_outside=args.allow_outside, allow_new_classes=True)
    if "train" not in splits:
        raise ValueError(f"--prevalence {args.prevalence}: it has no split 'train', only {list(splits)}.")
    return smoothed_prevalence(class_counts(align_labels(splits["train"], config, labels_of(args)), config.num_labels))


def _say_balances(calibration: Any, args: argparse.Namespace) -> None:
    """What balances are worth on the images of the calibration, at the model's own K."""
    rows = [row for row in calibration.tradeoff if row[0] == calibration.k]
    if not rows:
        text = "no balance but 0: how frequent the classes are is not known"
        print(f"{text} (--prevalence, or --balance to estimate it)")
        return
    from ..study.columns import MISSING, as_text

    heading = ["balance", "all images", "mean over classes", "few shot", "mean set size"]
    cells = [
        [f"{each:g}", *(MISSING if share is None else f"{share:.2%}" for share in shares), f"{size:.2f}"]
        for _, each, *shares, size in rows
    ]
    print(f"\naccuracy by balance, K = {calibration.k:g}\n{as_text(heading, cells)}")
    sources = {"train": "of the training", "given": "as given", "estimated": "estimated, mean probabilities"}
    known = sources.get(calibration.source.get("prevalence_from"), "unknown")
    if args.balance == "auto" and not calibration.balance:
        print(
            f"auto: every balance above 0 costs more than {args.give_up:g} points of all images (--give-up): it is 0"
        )
    print(
        f"(0: every image counts alike, 1: every class does, so that rare ones get in more easily; the model's own is"
        f" {calibration.balance:g}; {', '.join(f'{each:g}' for each in calibration.balances)} can be asked for, others"
        f" after a calibration with this --balance; frequencies of classes: {known})\n"
    )


def _draw(calibration: Any, args: argparse.Namespace) -> None:
    """The trade-off between size and coverage, and beside it that between balances."""
    from ..checks import title_of
    from ..study.plots import balance_curves, tradeoff_curve

    name, path = title_of(args.model), Path(args.plot)
    own = f", balance {calibration.balance:g}" if calibration.balance else ""
    at = [f", K = {k:g}{own}: accuracy {100 * c:.1f}%" for k, _, _, c, _ in calibration.curve if k == calibration.k]
    title = f"{name}{''.join(at)}. What larger sets buy, {args.split}"
    if tradeoff_curve(calibration.curve, path, title):
        say_written(path, "what larger sets buy", args)
    else:
        print("K = 1 alone makes no curve, so there is no picture: add e.g. --k 1 2 5.", file=sys.stderr)
    if calibration.tradeoff:
        title = f"{name}: what a balance is worth on {args.split}"
        path = path.with_name(f"{path.stem}_balance{path.suffix}")
        balance_curves(calibration.tradeoff, path, title)
        say_written(path, "what a balance is worth", args)


def _recorded(config: Any) -> dict[str, dict[str, Any]]:
    """What a config can be asked for."""
    from ..calibration import Calibration
    from ..conformal import describe_coverage
    from ..sets import k_key

    found = Calibration.of(config)
    return {
        "K": dict.fromkeys(map(k_key, found.ks)),
        "coverage": describe_coverage(found.coverage),
        "balance": {f"{balance:g}": None for balance in found.balances},
    }


def _say_what_changed(before: dict[str, dict], after: dict[str, dict], folder: Path | None) -> None:
    """The coverages of a calibration, what it replaced, and what in the model's folder is older than it."""
    for how in dict.fromkeys(after["coverage"].values()):
        levels = ", ".join(level for level, each in after["coverage"].items() if each == how)
        print(printable(f"can be asked for: --coverage {levels} by {how}"))
    for name, found in before.items():
        gone = [key for key in found if key not in after[name]]
        if gone:
            print(f"{name} = {printable(', '.join(gone))} of an earlier calibration: not recorded any more")
    older = [name for name in ("README.md", "onnx/model.onnx") if folder and (folder / name).is_file()]
    if older:
        print(
            f"older than these thresholds: {', '.join(older)} ({writes_card(folder)}, `avgk export` write them anew)"
        )
