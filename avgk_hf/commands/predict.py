"""`avgk predict`."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..rows import Row, check_ending, row, write_csv, written_to
from ..shell import printable
from .options import BAD_IMAGES, BALANCE, BATCH_SIZE, METHOD, PER_CLASS_WEIGHT, check_model, per_class_of

HELP = "print the predicted set of each image: as many classes as it needs, best first"
EXAMPLE = "avgk predict runs/plants photos --k 1 2 5 --out sets.csv"
LEFT_OUT = 1  # the exit code where some images could not be read


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a model")
    parser.add_argument("images", nargs="+", metavar="image", help="image files, or folders of them")
    sizes = "average set sizes, in the calibrated range (the model's own k)"
    parser.add_argument("--k", type=float, nargs="+", default=[], help=sizes)
    parser.add_argument("--coverage", type=float, metavar="C", help="or: hold the true class in this share of images")
    parser.add_argument("--cumulative", type=float, metavar="P", help="or: the fewest classes with this probability")
    parser.add_argument("--lambda-val", type=float, help="or: a threshold")
    parser.add_argument("--method", **METHOD)
    parser.add_argument("--per-class", action="store_true", help="reach the coverage in every class")
    parser.add_argument("--per-class-weight", **PER_CLASS_WEIGHT)
    parser.add_argument("--balance", **BALANCE)
    parser.add_argument("--min-size", type=int, default=1, help="at least this many classes (%(default)s)")
    parser.add_argument("--max-size", type=int, help="at most this many classes")
    parser.add_argument("--batch-size", **BATCH_SIZE)
    parser.add_argument("--on-bad-image", **{**BAD_IMAGES, "default": "skip"})
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument("--csv", action="store_true", help="print CSV, a row for each image and K")
    how.add_argument("--out", metavar="FILE", help="write them instead: .csv (for a spreadsheet), .jsonl or .parquet")
    parser.epilog = (
        f"For example `{EXAMPLE}`. Images that cannot be read are listed in the end, and the exit code is {LEFT_OUT}"
        " then; it is 2 where none can be read."
    )


def run(args: argparse.Namespace) -> int:
    check_model(args.model, args.k)
    if args.out:
        check_ending(args.out)
    if not any(Path(path).exists() for path in args.images):
        raise FileNotFoundError(f"{args.images[0]}: there is no such file; check the path.")
    from ..calibration import Calibration
    from ..checks import check_whole
    from ..classifiers import best_device, load_classifier, transform_for
    from ..questions import Question
    from ..scope import promise

    names = ("coverage", "cumulative", "lambda_val", "method", "min_size", "max_size", "balance")
    given = {name: getattr(args, name) for name in names} | {"per_class": per_class_of(args)}
    questions = [Question(k=k, **given) for k in args.k or [None]]
    check_whole("--batch-size", args.batch_size, 1)
    paths = _paths(args.images)
    model = load_classifier(args.model).to(best_device())
    calibration = Calibration.of(model.config).at(args.balance)
    answers = [(_asked(question, calibration), calibration.answer(question)) for question in questions]
    if args.coverage is not None and (approximate := promise(calibration)) is not None:
        print(approximate, file=sys.stderr)
    column, sizes, faults = answers[0][0][0], {asked: [] for (_, asked), _ in answers}, []
    with _output(args) as write:
        for entries, pixels in _batches(paths, transform_for(model), args.batch_size, args.on_bad_image):
            faults += [error for _, error in entries if error is not None]
            if len(faults) == len(paths):
                raise ValueError(faults[0] if len(paths) == 1 else f"none of the images can be read, e.g. {faults[0]}")
            names = [name for name, error in entries if error is None]
            found = iter(_predicted(model, names, pixels, calibration, answers))
            for name, error in entries:
                rows = next(found) if error is None else [row(name, asked, [], error) for asked, _ in answers]
                write(rows)
                for each in rows if error is None else ():
                    sizes[each[column]].append(each["size"])
    _say(args, column, sizes, faults, len(paths))
    return LEFT_OUT if faults else 0


def _say(args: argparse.Namespace, column: str, sizes: dict[float, list[int]], faults: list[str], number: int) -> None:
    """Which model answered what and how large the sets are, and what could not be read: beside the rows."""
    for value, found in sizes.items():
        mean, images = sum(found) / len(found), f"{len(found)} image{'s' * (len(found) != 1)}"
        text = f"{args.model}, {_words(column, value)}: {mean:.2f} classes on average over {images}"
        print(printable(text + (f", written to {args.out}" if args.out else "")), file=sys.stderr)
    if faults:
        print(f"left out {len(faults)} of {number} images that cannot be read:", file=sys.stderr)
        for fault in faults:
            print(f"  {printable(fault)}", file=sys.stderr)


def _paths(given: list[str]) -> list[str]:
    """The files that are meant; of a folder all images."""
    from ..data import image_files

    paths = []
    for path in given:
        found = [str(file) for file in image_files(path)] if Path(path).is_dir() else [path]
        if not found:
            raise ValueError(f"{path} holds no images; name image files, or a folder with PNG or JPEG files.")
        paths += found
    return paths


def _asked(question: Any, calibration: Any) -> tuple[str, float]:
    """What a question asks for: a name and a number."""
    for name in ("coverage", "cumulative", "lambda_val", "k"):
        if getattr(question, name) is not None:
            return name, getattr(question, name)
    return "k", calibration.k


def _words(name: str, value: float) -> str:
    return f"{'K' if name == 'k' else name} = {value:g}"


@contextmanager
def _output(args: argparse.Namespace) -> Iterator[Callable[[Iterable[Row]], None]]:
    """What takes rows: a file, or one of three ways to print them."""
    if args.out:
        with written_to(args.out) as write:
            yield write
    elif args.csv:
        yield write_csv(sys.stdout)
    elif args.json:
        rows: list[Row] = []
        yield rows.extend
        texts = [each["image"] for each in rows] + [item["label"] for each in rows for item in each["set"]]
        plain = all(printable(text) == text for text in texts)
        print(json.dumps(rows, indent=2, ensure_ascii=not plain))
    else:
        several = len(args.k) > 1

        def write(rows: Iterable[Row]) -> None:
            for each in rows:
                if each["error"] is None:
                    _print(each, several)

        yield write


def _print(found: Row, several: bool) -> None:
    number = found["size"]
    asked = f", {_words('k', found['k'])}" if several else ""
    print(f"{printable(found['image'])}{asked}: {number} class{'es' * (number != 1)}")
    for item in found["set"]:
        print(f"  {item['score']:8.4f}  {printable(item['label'])}")


def _predicted(
    model: Any, names: list[str], pixels: Any, calibration: Any, answers: list[tuple[tuple[str, float], Any]]
) -> list[tuple[Row, ...]]:
    """The rows of a batch: for every image those of all questions, from one pass through the model."""
    import torch

    from ..classifiers import forward
    from ..scores import NotFinite, head_logits

    if not names:
        return []
    with torch.no_grad():
        logits = head_logits(forward(model.eval(), pixels))
    by_question = []
    for asked, answer in answers:
        try:
            scores = calibration.scores(*logits, answer.head).cpu()  # (b, L)
        except NotFinite as error:
            raise NotFinite(f"images from {names[0]} on, counted from 0: {error}") from None
        sets = zip(names, scores, answer.classes(scores), strict=True)
        by_question.append(
            [
                row(name, asked, [{"label": model.config.id2label[j], "score": own[j].item()} for j in classes])
                for name, own, classes in sets
            ]
        )
    return list(zip(*by_question, strict=True))


def _batches(
    paths: list[str], transform: Any, size: int, on_bad_image: str
) -> Iterator[tuple[list[tuple[str, str | None]], Any]]:
    """Paths in their order, each with why it cannot be read, or None, and the images (b, C, H, W) of the others.

    b is at most `size`; images that keep their own shapes come apart.
    """
    import torch
    from huggingface_hub.utils import tqdm

    entries: list[tuple[str, str | None]] = []
    images: list[torch.Tensor] = []
    for path in tqdm(paths, desc="predict", unit="image", disable=len(paths) < 20):
        try:
            image = transform.image(path)
        except (OSError, ValueError) as error:
            if on_bad_image == "error":
                raise
            entries.append((path, str(error)))
            continue
        if images and (len(images) == size or image.shape != images[0].shape):
            yield entries, torch.stack(images)
            entries, images = [], []
        entries.append((path, None))
        images.append(image)
    if entries:
        yield entries, torch.stack(images) if images else None
