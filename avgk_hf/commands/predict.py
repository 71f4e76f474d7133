"""`avgk predict`."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..shell import printable
from .options import BAD_IMAGES, BATCH_SIZE, METHOD

HELP = "print the predicted set of each image: as many classes as it needs, best first"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a model")
    parser.add_argument("images", nargs="+", metavar="image", help="image files, or folders of them")
    parser.add_argument("--k", type=float, help="average set size, in the calibrated range (the model's own k)")
    parser.add_argument("--coverage", type=float, metavar="C", help="or: hold the true class in this share of images")
    parser.add_argument("--cumulative", type=float, metavar="P", help="or: the fewest classes with this probability")
    parser.add_argument("--lambda-val", type=float, help="or: a threshold")
    parser.add_argument("--method", **METHOD)
    parser.add_argument("--per-class", action="store_true", help="reach the coverage in every class")
    parser.add_argument("--min-size", type=int, default=1, help="at least this many classes (%(default)s)")
    parser.add_argument("--max-size", type=int, help="at most this many classes")
    parser.add_argument("--batch-size", **BATCH_SIZE)
    parser.add_argument("--on-bad-image", **BAD_IMAGES)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    from ..calibration import Calibration
    from ..checks import check_whole
    from ..classifiers import best_device, load_classifier, model_scores, transform_for
    from ..data import image_files
    from ..questions import Question
    from ..scope import promise
    from ..scores import NotFinite

    names = ("k", "coverage", "cumulative", "lambda_val", "method", "per_class", "min_size", "max_size")
    question = Question(**{name: getattr(args, name) for name in names})
    check_whole("--batch-size", args.batch_size, 1)
    model = load_classifier(args.model).to(best_device())
    calibration = Calibration.of(model.config)
    answer = calibration.answer(question)
    if args.coverage is not None and (approximate := promise(calibration)) is not None:
        print(approximate, file=sys.stderr)
    paths = []
    for path in args.images:
        found = [str(file) for file in image_files(path)] if Path(path).is_dir() else [path]
        if not found:
            raise ValueError(f"{path} holds no images; name image files, or a folder with PNG or JPEG files.")
        paths += found
    predictions = []
    for names, pixels in _batches(paths, transform_for(model), args.batch_size, args.on_bad_image):
        try:
            scores = model_scores(model, pixels, args.k).cpu()  # (b, L)
        except NotFinite as error:
            raise NotFinite(f"images from {names[0]} on, counted from 0: {error}") from None
        for name, row, classes in zip(names, scores, answer.classes(scores), strict=True):
            found = [{"label": model.config.id2label[j], "score": row[j].item()} for j in classes]
            predictions.append({"image": name, "set": found})
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


def _batches(paths: list[str], transform: Any, size: int, on_bad_image: str) -> Iterator[tuple[list[str], Any]]:
    """Paths and images (b, C, H, W), b at most `size`; images that keep their own shapes come apart."""
    import torch
    from huggingface_hub.utils import tqdm

    names: list[str] = []
    images: list[torch.Tensor] = []
    for path in tqdm(paths, desc="predict", unit="image", disable=len(paths) < 20):
        try:
            image = transform.image(path)
        except (OSError, ValueError) as error:
            if on_bad_image == "error":
                raise
            print(f"left out: {printable(error)}", file=sys.stderr)
            continue
        if images and (len(images) == size or image.shape != images[0].shape):
            yield names, torch.stack(images)
            names, images = [], []
        names.append(path)
        images.append(image)
    if images:
        yield names, torch.stack(images)
