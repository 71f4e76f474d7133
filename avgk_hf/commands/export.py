"""`avgk export`."""

import argparse
import json
from pathlib import Path

from .options import ALLOW_OUTSIDE, BALANCE, check_model, check_pictures, label_arguments, labels_of

HELP = "write a model as ONNX, from pixels to scores and sets, or as a folder for an Inference Endpoint"
OF_ONNX = ("out", "k", "balance", "opset", "int8", "dataset", "split")
OF_ONNX += ("label_map", "labels_by_position", "allow_outside")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a calibrated model")
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--onnx", action="store_true", help="an ONNX graph")
    endpoint = "a new folder for an Inference Endpoint: handler.py, requirements.txt, the model, the package"
    form.add_argument("--endpoint", metavar="DIR", help=endpoint)
    parser.add_argument("--out", metavar="DIR", help="folder to write to (MODEL/onnx)")
    parser.add_argument("--k", type=float, help="set size whose head is exported, for head=auto (the model's own)")
    parser.add_argument("--balance", **BALANCE)
    parser.add_argument("--opset", type=int, help="version of the ONNX operators (what torch prefers)")
    parser.add_argument("--int8", action="store_true", help="also write an 8-bit graph")
    parser.add_argument("--dataset", help="labelled images to measure the graphs on, as for `avgk evaluate`")
    parser.add_argument("--split", help="split of the dataset (test)")
    label_arguments(parser)
    parser.add_argument("--allow-outside", **ALLOW_OUTSIDE)
    parser.add_argument("--plot", metavar="FILE", help="picture of the graphs' sizes and accuracies")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> None:
    if args.endpoint:
        for name in (*OF_ONNX, "plot", "json"):
            if getattr(args, name) is not None and getattr(args, name) is not False:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is for --onnx: leave it out. An endpoint is asked in each request.")
        check_model(args.model)
        from ..endpoint import write_endpoint

        print(write_endpoint(args.model, args.endpoint))
        return
    check_model(args.model)
    check_pictures(args.plot)
    from ..classifiers import load_classifier
    from ..data import align_labels, load_splits
    from ..export import describe, export_onnx

    if not args.out and not Path(args.model).is_dir():
        raise ValueError("name a folder for the exported model with --out.")
    out = args.out or str(Path(args.model) / "onnx")
    if not args.dataset and args.split:
        raise ValueError("--split is one of a dataset to measure on: name it with --dataset.")
    if not args.dataset and (args.label_map or args.labels_by_position):
        raise ValueError("there are no classes to match without a dataset to measure on: name one with --dataset.")
    model = load_classifier(args.model)
    given = {"allow_outside": args.allow_outside, "allow_new_classes": True}  # the model's classes count
    splits = load_splits(args.dataset, **given) if args.dataset else {}
    split = args.split or "test"
    if splits and split not in splits:
        raise ValueError(f"the dataset {args.dataset!r} has no split {split!r}, only {list(splits)}: --split.")
    dataset = align_labels(splits[split], model.config, labels_of(args)) if splits else None
    report = export_onnx(model, out, args.k, args.opset, args.int8, dataset, balance=args.balance)
    if args.plot:
        from ..calibration import Calibration
        from ..checks import title_of
        from ..sets import k_key
        from ..study.plots import export_bars

        own, name = f"average_k_accuracy@{k_key(Calibration.of(model.config).k)}", title_of(args.model)
        known = [metrics[own] for metrics in report.get("measured", {}).values() if own in metrics]
        accuracies = " and ".join(f"{100 * accuracy:.1f}%" for accuracy in known)
        at = f", K = {own.partition('@')[2]}: accuracy {accuracies} on {split}" if known else ""
        export_bars(report, args.plot, f"{name} as ONNX graph{'s, float and 8 bit' * args.int8}{at}")
    print(json.dumps(report, indent=2) if args.json else describe(report, out))
