"""The `avgk` command. Heavy imports wait until a command needs them."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import __version__
from .files import new_file, open_log, refuse_link, write_text
from .shell import guarded, logged, printable

METHODS = ("lac", "aps", "raps")  # of coverage; conformal.py knows them too, but imports torch
BAD_IMAGES = {
    "choices": ("error", "skip"),
    "default": "error",
    "help": "refuse an image that cannot be read, or leave it out and say so (%(default)s)",
}
ALLOW_OUTSIDE = {
    "action": "store_true",
    "help": "let the dataset point out of itself: links, paths of images, addresses in its README",
}


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="avgk",
        description="Image classification with as many classes as the image needs, K on average.",
        epilog="`avgk COMMAND --help` explains a command. With AVGK_DEBUG=1 errors come with their traceback.",
    )
    parser.add_argument("--version", action="version", version=f"avgk_hf {__version__}")
    parser.add_argument("--log", metavar="FILE", help="append to a file what is printed; before the command")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train CE and AVG-K on generated glyphs and compare them (3 minutes)")
    demo.add_argument("--out", default="runs/demo", help="folder for models, pictures and table (%(default)s)")

    commands.add_parser("train", help="train a model from a recipe")

    for name, text in (
        ("calibrate", "compute a model's thresholds on validation images"),
        ("evaluate", "evaluate a calibrated model; on images without labels only the sizes of its sets"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("model", help="folder or Hub id of a model")
        command.add_argument("dataset", help="glyphs, a folder of images or parquet, a saved dataset, or a Hub id")
        default = "validation" if name == "calibrate" else "test"
        command.add_argument("--split", default=default, help="split of the dataset (%(default)s)")
        sizes = "set sizes besides the model's own" + "; replace those recorded before" * (name == "calibrate")
        command.add_argument("--k", type=float, nargs="+", default=[], help=sizes)
        levels = "to compute thresholds for (0.9 0.95 0.99)" if name == "calibrate" else "to report (all recorded)"
        command.add_argument("--coverage", type=float, nargs="+", metavar="C", help=f"coverage levels {levels}")
        command.add_argument("--per-class", action="store_true", help="coverage thresholds for each class")
        command.add_argument("--batch-size", type=int, default=64, help="images per forward pass (%(default)s)")
        command.add_argument("--workers", type=int, default=0, help="processes that read images (%(default)s)")
        command.add_argument("--seed", type=int, default=0, help="seed of generated glyphs (%(default)s)")
        command.add_argument("--image-column", default="image", help="column that holds the images (%(default)s)")
        command.add_argument("--label-column", default="label", help="column that holds the classes (%(default)s)")
        command.add_argument("--validation-per-class", type=int, help="take so many images of each class from train")
        command.add_argument("--split-seed", type=int, default=0, help="which of them, as in training (%(default)s)")
        command.add_argument("--on-bad-image", **BAD_IMAGES)
        command.add_argument("--allow-outside", **ALLOW_OUTSIDE)
        command.add_argument("--json", action="store_true", help="print the metrics as JSON")
        shown = "size against coverage" if name == "calibrate" else "the mean set size and its interval"
        command.add_argument("--plot", metavar="FILE", help=f"picture of {shown}, PNG or SVG")
        if name == "calibrate":
            command.add_argument("--out", help="folder for the calibrated model (default: write to MODEL)")
            command.add_argument("--push", metavar="REPO", help="upload the folder of --out to the Hub")
        else:
            command.add_argument("--out", help="JSON file to write the metrics to")
            command.add_argument("--method", choices=METHODS, default="lac", help="how coverage is reached (lac)")

    text = "print the predicted set of each image: as many classes as it needs, best first"
    predict = commands.add_parser("predict", help=text, description=text)
    predict.add_argument("model", help="folder or Hub id of a model")
    predict.add_argument("images", nargs="+", metavar="image", help="image files, or folders of them")
    predict.add_argument("--k", type=float, help="average set size, in the calibrated range (the model's own k)")
    predict.add_argument("--coverage", type=float, metavar="C", help="or: hold the true class in this share of images")
    predict.add_argument("--cumulative", type=float, metavar="P", help="or: the fewest classes with this probability")
    predict.add_argument("--lambda-val", type=float, help="or: a threshold")
    predict.add_argument("--method", choices=METHODS, default="lac", help="how coverage is reached (lac)")
    predict.add_argument("--per-class", action="store_true", help="reach the coverage in every class")
    predict.add_argument("--min-size", type=int, default=1, help="at least this many classes (%(default)s)")
    predict.add_argument("--max-size", type=int, help="at most this many classes")
    predict.add_argument("--on-bad-image", **BAD_IMAGES)
    predict.add_argument("--json", action="store_true", help="print JSON")

    text = "write a model as ONNX, from pixels to scores and sets"
    export = commands.add_parser("export", help=text, description=text)
    export.add_argument("model", help="folder or Hub id of a calibrated model")
    export.add_argument("--onnx", action="store_true", required=True, help="the format")
    export.add_argument("--out", metavar="DIR", help="folder to write to (MODEL/onnx)")
    export.add_argument("--k", type=float, help="set size whose head is exported, for head=auto (the model's own)")
    export.add_argument("--opset", type=int, help="version of the ONNX operators (what torch prefers)")
    export.add_argument("--int8", action="store_true", help="also write an 8-bit graph")
    export.add_argument("--dataset", help="labelled images to measure the graphs on, as for `avgk evaluate`")
    export.add_argument("--split", default="test", help="split of the dataset (%(default)s)")
    export.add_argument("--allow-outside", **ALLOW_OUTSIDE)
    export.add_argument("--plot", metavar="FILE", help="picture of the graphs' sizes and accuracies")
    export.add_argument("--json", action="store_true", help="print the report as JSON")

    push = commands.add_parser("push", help="upload a trained model to the Hub")
    push.add_argument("run", metavar="RUN", help="folder of a run")
    push.add_argument("repo", metavar="REPO", help="user/name on the Hub; created if it does not exist")
    push.add_argument("--private", action="store_true", help="make a new repository private")

    card = commands.add_parser("card", help="write the model card of a run")
    card.add_argument("run", metavar="RUN", help="folder of a finished `avgk train`")
    card.add_argument("--repo", help="name of the model, as users load it (the folder's name)")
    card.add_argument("--out", help="file to write (RUN/README.md)")

    sweep = commands.add_parser(
        "sweep", help="search hyperparameters on validation, report the winner on test", allow_abbrev=False
    )
    sweep.add_argument("recipe", metavar="RECIPE", help="a recipe, or a sweep file that names one")
    sweep.add_argument(
        "--search", nargs="+", default=[], metavar="FIELD=V1,V2", help="values to try, e.g. alpha=1,3,10"
    )
    sweep.add_argument("--seeds", type=int, help="trainings of every combination (1)")
    sweep.add_argument("--scale-learning-rate", action="store_true", help="learning rate in proportion to batch size")
    sweep.add_argument("--backend", choices=["optuna", "ray"], help="optuna, or ray for a cluster (optuna)")
    sweep.add_argument("--out", help="folder for study, table, plot and the winner's runs (runs/sweep-...)")
    sweep.epilog = "Further `--field value` arguments override the recipe. The same command goes on after a crash."

    compare = commands.add_parser("compare", help="compare losses: tuned alike, several seeds, one report")
    compare.add_argument("config", metavar="CONFIG", help="a comparison file, e.g. recipes/glyphs/compare.yaml")
    compare.add_argument("--workers", type=int, default=1, help="processes, with one thread each (%(default)s)")
    compare.add_argument("--out", help="folder for results, report and pictures (the file's output_dir)")
    compare.add_argument("--dry-run", action="store_true", help="print the plan and how long it would take")
    compare.epilog = "Further `--field value` arguments override the recipe, e.g. `--dataset my_plants`. " + (
        "The same command goes on after a crash, and in a second shell helps the first."
    )

    report = commands.add_parser("report", help="mean and 95%% confidence interval of runs over their seeds")
    report.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs, or of several seeds")
    report.add_argument("--out", default="runs/report", help="folder for report.md and report.json (%(default)s)")

    plot = commands.add_parser("plot", help="draw set sizes, accuracy against K and contact sheets of runs")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished `avgk train` runs")
    plot.add_argument("--out", default="runs/plots", help="folder for the pictures, PNG and SVG (%(default)s)")
    plot.add_argument("--allow-outside", **ALLOW_OUTSIDE)

    text = "show a calibrated model's sets on a page in the browser"
    app = commands.add_parser("app", help=text, description=text)
    app.add_argument("model", help="folder or Hub id of a calibrated model")
    app.add_argument("--port", type=int, default=7860, help="where to listen on 127.0.0.1 (%(default)s)")
    app.add_argument("--examples", metavar="DIR", help="folder of example images (for glyphs they are drawn)")
    app.add_argument("--space", metavar="DIR", help="write the page as a folder for a Hugging Face Space instead")

    glyphs = commands.add_parser("glyphs", help="write the generated glyphs as an image folder")
    glyphs.add_argument("--out", required=True, help="folder to write split/class/image.png to")
    glyphs.add_argument("--seed", type=int, default=0, help="same seed, same images (%(default)s)")
    return parser


def run_demo(args: argparse.Namespace) -> None:
    """`avgk demo`."""
    from .demo import demo

    demo(args.out)


def run_train(args: argparse.Namespace) -> None:
    """`avgk train`."""
    from .train import main as train

    train(args.arguments)


def run_evaluate(args: argparse.Namespace) -> None:
    """`avgk evaluate` and `avgk calibrate`."""
    from .calibrate import evaluate, load_classifier, save_classifier, write_thresholds
    from .data import load_splits
    from .hub import push_folder
    from .monitor import SetSizeMonitor

    calibrate = args.command == "calibrate"
    if calibrate and not args.out and (args.push or not Path(args.model).is_dir()):
        raise ValueError("name a folder for the calibrated model with --out.")
    if args.out or calibrate:  # now, and not when all is computed
        refuse_link(args.out or args.model if calibrate else Path(args.out).parent)
    model = load_classifier(args.model)
    splits = load_splits(
        args.dataset,
        image_column=args.image_column,
        label_column=args.label_column,
        seed=args.seed,
        validation_per_class=args.validation_per_class,
        split_seed=args.split_seed,
        unlabelled=not calibrate and args.label_column == "label",  # one that is named has to be there
        allow_outside=args.allow_outside,
    )
    if len(splits) == 1 and args.split == "test" and "label" not in next(iter(splits.values())).column_names:
        args.split = next(iter(splits))  # a folder of image files has no splits
    if args.split not in splits:
        raise ValueError(f"the dataset {args.dataset!r} has no split {args.split!r}, only {list(splits)}: --split.")
    if "label" not in splits[args.split].column_names:
        text = f"{args.dataset} has no column 'label' (another one is named with --label-column)"
        print(f"{text}, so only the sizes of the sets are evaluated.", file=sys.stderr)
    name = Path(args.dataset).name if Path(args.dataset).exists() else args.dataset
    before = _recorded(model.config)
    monitor = None if calibrate else SetSizeMonitor.from_config(model.config, *args.k[:1])
    metrics = evaluate(
        model,
        splits[args.split],
        args.k,
        calibrate,
        args.batch_size,
        args.workers,
        name,
        args.on_bad_image,
        args.coverage,
        "lac" if calibrate else args.method,
        args.per_class,
        monitor,
    )
    if os.environ.get("RANK", "0") != "0":  # of several processes, started by accelerate or torchrun, the first writes
        return
    text = json.dumps(metrics, indent=2)
    if calibrate and args.out:
        save_classifier(model, args.out, metrics)
    elif calibrate:
        write_thresholds(model, args.model)
    elif args.out:
        write_text(args.out, text + "\n")
    width = max(32, *(len(name) + 2 for name in metrics))
    print(text if args.json else "\n".join(f"{name:{width}}{value:.6g}" for name, value in metrics.items()))
    if monitor and not monitor.drifted and not args.json:  # a drift was said already
        print(monitor.message())
    if args.plot:
        from .plots import set_size_course, tradeoff_curve

        if calibrate:
            tradeoff_curve({Path(args.model).resolve().name: model.config.calibration["curve"]}, args.plot)
        else:
            set_size_course(monitor, args.plot)
    if calibrate and not args.json:
        print(f"thresholds written to {args.out or args.model}")
        _say_what_changed(before, _recorded(model.config), None if args.out else Path(args.model))
    if calibrate and args.push:
        print(push_folder(args.out, args.push))


def _recorded(config: Any) -> dict[str, dict[str, Any]]:
    """What a config can be asked for."""
    from .conformal import describe

    return {
        "K": getattr(config, "thresholds", None) or {},
        "coverage": describe(getattr(config, "coverage", None) or {}),
    }


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


def run_predict(args: argparse.Namespace) -> None:
    """`avgk predict`."""
    from huggingface_hub.utils import tqdm

    from .calibrate import load_classifier, model_scores, transform_for
    from .conformal import answer, check_request
    from .data import image_files
    from .sets import ranked_sets

    names = ("k", "coverage", "cumulative", "lambda_val", "method", "per_class", "min_size", "max_size")
    question = {name: getattr(args, name) for name in names}
    model = load_classifier(args.model)
    check_request(model.config, **question)
    transform = transform_for(model)
    paths = []
    for path in args.images:
        found = [str(file) for file in image_files(path)] if Path(path).is_dir() else [path]
        if not found:
            raise ValueError(f"{path} holds no images; name image files, or a folder with PNG or JPEG files.")
        paths += found
    predictions = []
    for path in tqdm(paths, desc="predict", unit="image", disable=len(paths) < 20):
        try:
            pixels = transform.image(path)
        except (OSError, ValueError) as error:
            if args.on_bad_image == "error":
                raise
            print(f"left out: {printable(error)}", file=sys.stderr)
            continue
        scores = model_scores(model, pixels[None], args.k)  # (1, L)
        classes = ranked_sets(scores, answer(scores, model.config, **question))[0]
        found = [{"label": model.config.id2label[j], "score": scores[0, j].item()} for j in classes]
        predictions.append({"image": path, "set": found})
    if args.json:
        plain = all(printable(item["label"]) == item["label"] for found in predictions for item in found["set"])
        plain = plain and all(printable(found["image"]) == found["image"] for found in predictions)
        print(json.dumps(predictions, indent=2, ensure_ascii=not plain))
        return
    for prediction in predictions:
        number = len(prediction["set"])
        print(f"{printable(prediction['image'])}: {number} class{'es' * (number != 1)}")
        for item in prediction["set"]:
            print(f"  {item['score']:8.4f}  {printable(item['label'])}")


def run_export(args: argparse.Namespace) -> None:
    """`avgk export`."""
    from .calibrate import load_classifier
    from .data import load_splits
    from .export import describe, export_onnx

    if not args.out and not Path(args.model).is_dir():
        raise ValueError("name a folder for the exported model with --out.")
    out = args.out or str(Path(args.model) / "onnx")
    model = load_classifier(args.model)
    splits = load_splits(args.dataset, allow_outside=args.allow_outside) if args.dataset else {}
    if splits and args.split not in splits:
        raise ValueError(f"the dataset {args.dataset!r} has no split {args.split!r}, only {list(splits)}: --split.")
    dataset = splits[args.split] if splits else None
    report = export_onnx(model, out, args.k, args.opset, args.int8, dataset)
    if args.plot:
        from .plots import export_bars

        export_bars(report, args.plot)
    print(json.dumps(report, indent=2) if args.json else describe(report, out))


def run_push(args: argparse.Namespace) -> None:
    """`avgk push`."""
    from .hub import push_folder

    print(push_folder(args.run, args.repo, private=args.private or None))


def run_card(args: argparse.Namespace) -> None:
    """`avgk card`."""
    from .model_card import card_of_run

    out = Path(args.out or Path(args.run) / "README.md")
    with new_file(out) as new:
        card_of_run(args.run, args.repo).save(new)
    print(f"written to {out}")


def run_sweep(args: argparse.Namespace) -> None:
    """`avgk sweep`."""
    from .sweep import parse_search, read_sweep, run_sweep

    given = {"seeds": args.seeds, "backend": args.backend, "output_dir": args.out, "overrides": args.overrides}
    search, scale = parse_search(args.search) or None, args.scale_learning_rate or None
    sweep = read_sweep(args.recipe, search=search, scale_learning_rate=scale, **given)
    found = run_sweep(sweep)
    if "winner" in found:
        print((Path(sweep.output_dir) / "sweep.md").read_text())
        print(f"written to {sweep.output_dir}")


def run_compare(args: argparse.Namespace) -> None:
    """`avgk compare`."""
    from .compare import run_comparison
    from .comparison import read_comparison

    comparison = read_comparison(args.config, output_dir=args.out, overrides=args.overrides)
    text = run_comparison(comparison, args.workers, args.dry_run)
    print("\n".join(map(printable, text.split("\n"))))
    if not args.dry_run:
        print(f"written to {comparison.output_dir}")


def run_report(args: argparse.Namespace) -> None:
    """`avgk report`."""
    from .report import write_report

    print(write_report(args.runs, args.out))


def run_plot(args: argparse.Namespace) -> None:
    """`avgk plot`."""
    from .plots import plot_runs

    for path in plot_runs(args.runs, args.out, allow_outside=args.allow_outside):
        print(printable(path))


def run_app(args: argparse.Namespace) -> None:
    """`avgk app`."""
    from .app import serve
    from .space import write_space

    if args.space:
        print(write_space(args.model, args.space, args.examples))
    else:
        serve(args.model, args.port, args.examples)


def run_glyphs(args: argparse.Namespace) -> None:
    """`avgk glyphs`."""
    from .data.glyphs import load_glyphs, write_image_folder

    write_image_folder(load_glyphs(args.seed), args.out)
    print(f"written to {args.out}; use it as `dataset: {args.out}`")


COMMANDS = {
    "demo": run_demo,
    "train": run_train,
    "calibrate": run_evaluate,
    "evaluate": run_evaluate,
    "predict": run_predict,
    "sweep": run_sweep,
    "compare": run_compare,
    "report": run_report,
    "plot": run_plot,
    "export": run_export,
    "push": run_push,
    "card": run_card,
    "app": run_app,
    "glyphs": run_glyphs,
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `avgk`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    log = None
    if arguments[:1] == ["--log"] and len(arguments) > 2:  # of every command, also of those that read the rest later
        log, arguments = arguments[1], arguments[2:]
    if arguments[:1] == ["train"]:  # its options are the recipe's fields, which only the training code knows
        args = argparse.Namespace(command="train", arguments=arguments[1:])
    elif arguments[:1] in (["sweep"], ["compare"]):  # as far as it does not know them itself
        args, overrides = build_parser().parse_known_args(arguments)
        args.overrides = overrides
    else:
        args = build_parser().parse_args(arguments)
    try:
        file = open_log(log) if log else None
    except OSError as error:
        print(f"avgk: nothing can be logged to {log} ({error}).", file=sys.stderr)
        return 2
    with logged(file, arguments):
        return guarded(args.command, lambda: COMMANDS[args.command](args))


if __name__ == "__main__":
    sys.exit(main())
