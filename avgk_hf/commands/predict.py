"""`avgk predict`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..rows import ENDINGS, Row, check_ending, write_csv, written_to
from ..shell import printable
from .options import (
    ALLOW_OUTSIDE,
    BAD_IMAGES,
    BALANCE,
    BATCH_SIZE,
    LEFT_OUT,
    METHOD,
    PER_CLASS_WEIGHT,
    check_model,
    per_class_of,
    say_left_out,
    say_shared,
)

HELP = "the predicted set of each image, printed or written: as many classes as it needs, best first"
EXAMPLE = "avgk predict runs/plants photos --k 1 2 5 --out sets.csv"
SHARD = 8192
LONGER, ENOUGH = 1.25, 10  # times the K that was asked for, of so many images: worth a word
MOST_NAMES = 5  # classes that are counted on the screen
UNKNOWN = (
    "longer sets than asked for: that may be chance (`avgk evaluate` of the same images says), or these images differ"
    " from those of the calibration, or show classes that the model was not taught. It cannot recognise such a class,"
    " and a wrong one may score high."
)
SOURCE = "image files, folders, lists (.txt), WebDataset .tar, .parquet, saved datasets, or datasets on the Hub"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a model")
    parser.add_argument("images", nargs="+", metavar="source", help=SOURCE)
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
    parser.add_argument("--workers", type=int, help="processes that read images (one for each processor, 8 at most)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, which new accelerators do faster")
    parser.add_argument("--on-bad-image", **{**BAD_IMAGES, "default": "skip"})
    parser.add_argument("--split", help="of a dataset with several")
    parser.add_argument("--image-column", help="column that holds the images, in Parquet and datasets (image)")
    parser.add_argument("--allow-outside", **ALLOW_OUTSIDE)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument("--csv", action="store_true", help="print CSV, a row for each image and K")
    out = "write them: .csv (for a spreadsheet), .jsonl or .parquet; or a folder, for as many as there are"
    how.add_argument("--out", metavar="FILE", help=out)
    parser.add_argument("--shard-size", type=int, help=f"images in a file of the folder ({SHARD})")
    parser.add_argument("--engine", choices=("torch", "ray"), default="torch", help="ray: on the cluster that runs")
    parser.epilog = (
        f"For example `{EXAMPLE}`. Images that cannot be read are listed in the end, and the exit code is {LEFT_OUT}"
        " then; it is 2 where none can be read. A folder can be written by several processes, and after a crash the"
        " same command goes on."
    )


def run(args: argparse.Namespace) -> int:
    check_model(args.model, args.k, levels=() if args.coverage is None else (args.coverage,), images=args.images[0])
    if args.cumulative is not None and 1 < args.cumulative < 100:
        raise ValueError(f"cumulative={args.cumulative:g} is no probability; did you mean {args.cumulative / 100:g}?")
    to_folder, args.replaces = _to_folder(args), bool(args.out) and Path(args.out).is_file()
    _check_there(args.images)
    from ..checks import check_whole
    from ..classifiers import best_device, load_classifier
    from ..data.sources import Source, left_out
    from ..prediction import Predictor, Shards
    from ..processes import launched
    from ..questions import Question
    from ..scope import promise

    names = ("coverage", "cumulative", "lambda_val", "method", "min_size", "max_size", "balance")
    given = {name: getattr(args, name) for name in names} | {"per_class": per_class_of(args)}
    questions = [Question(k=k, **given) for k in args.k or [None]]
    check_whole("--batch-size", args.batch_size, 1)
    size = SHARD if args.shard_size is None else check_whole("--shard-size", args.shard_size, 1)
    workers = _workers(args) if args.workers is None else check_whole("--workers", args.workers)
    source = Source(args.images, args.split, args.image_column, args.allow_outside)
    next(source.pieces())  # a source that is not there is refused before the model is loaded
    rank, world_size = launched()
    if rank == 0 and (formats := left_out(*args.images)):
        print(f"{formats}.", file=sys.stderr)
    device = "cpu" if args.engine == "ray" else best_device(join=False)  # of the actors each has its own
    how = {"batch_size": args.batch_size, "workers": workers, "bf16": args.bf16, "on_bad_image": args.on_bad_image}
    predictor = Predictor(load_classifier(args.model).to(device), questions, **how)
    if rank == 0 and len({answer.head for _, answer in predictor.answers}) > 1:
        print("different heads answer for these K, so a smaller set may hold what a larger does not.", file=sys.stderr)
    say_shared(predictor.calibration, [] if args.coverage is None else [args.coverage], given["per_class"])
    if args.coverage is not None and (approximate := promise(predictor.calibration)) is not None:
        print(f"{approximate.partition(', so that')[0]} (`avgk info` says more).", file=sys.stderr)
    if to_folder:
        shards = Shards(args.out, predictor, source, size)
        if args.engine == "ray":
            from ..cluster import write_on_ray

            write_on_ray(shards, args.model, questions, how)
        else:
            shards.write_share(rank, world_size)
        _say_shards(args.out, shards)
        already = shards.broken
    else:
        already = 0
        with _output(args) as write:
            for rows in predictor.rows(source):
                write(rows)
            _check_some(predictor.tally)
    new = " of this run" * (to_folder and shards.images > predictor.tally.images)
    _say(args, predictor.column, predictor.tally, new, predictor.calibration.balance, to_folder)
    if world_size > 1:  # whatever started the processes would end the others
        return 0
    _check_some(predictor.tally)
    return LEFT_OUT if predictor.tally.left_out or already else 0


def _check_there(images: list[str]) -> None:
    """Refuse images that are nowhere, before torch is imported and before the Hub is asked for a misspelt name."""
    from ..checks import is_hub_id, leads_inside, near_folder

    near = near_folder(images[0])
    if near or not any(Path(place).exists() or (is_hub_id(place) and not leads_inside(place)) for place in images):
        words = [images[:i] for i in range(2, len(images) + 1)]
        whole = next((name for name in map(" ".join, words) if Path(name).exists()), None)
        hint = f"did you mean {near!r}?" if near else "check the path."
        hint = f"put a name with spaces in quotes, {whole!r}." if whole else hint
        raise FileNotFoundError(f"{images[0]}: there is no such file; {hint}")


def _workers(args: argparse.Namespace) -> int:
    """A process for each processor that is this process's share; Ray's actors are that already."""
    own = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 0 if args.engine == "ray" else min(own, 8)


def _to_folder(args: argparse.Namespace) -> bool:
    """Whether shards in a folder are asked for; what only these can be is refused for anything else."""
    folder = args.out and (not Path(args.out).suffix or args.out.endswith(os.sep) or Path(args.out).is_dir())
    if not folder:
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        if several or args.engine != "torch":
            raise ValueError("several processes write files of their own: name a folder for them, e.g. `--out sets`.")
        if args.shard_size is not None:
            raise ValueError("--shard-size is for a folder of files: name one, e.g. `--out sets`.")
        if args.out:
            if Path(args.out).suffix.lower() in (".xls", ".xlsx"):
                raise ValueError(f"{args.out} ends with none of {', '.join(ENDINGS)}; Excel opens .csv.")
            check_ending(args.out)
        return False
    if args.engine == "ray" and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("--engine ray starts processes itself: run the command without a launcher.")
    for place in args.images:
        if Path(args.out).resolve().is_relative_to(Path(place).resolve()):
            raise ValueError(f"--out {args.out} lies in {place}, whose files are read: choose a folder elsewhere.")
    return True


def _say_shards(folder: str, shards: Any) -> None:
    left = shards.finish()
    text = f"{folder}: {shards.images} images in {shards.seen} file{'s' * (shards.seen != 1)}"
    left = f"; {left} of them are not there yet: other processes write them, or the same command does" if left else ""
    broken = f"; {shards.broken} images of files that were there cannot be read (`error` says why)"
    print(printable(text + left + broken * bool(shards.broken)), file=sys.stderr)


def _check_some(tally: Any) -> None:
    if tally.images and tally.left_out == tally.images:
        text = tally.faults[0] if tally.images == 1 else f"none of the images can be read, e.g. {tally.faults[0]}"
        raise ValueError(text)


def _say(args: argparse.Namespace, column: str, tally: Any, new: str, balance: float, to_folder: bool) -> None:
    """Which model answered what and how large the sets are, and what could not be read: beside the rows."""
    number = tally.images - tally.left_out
    for value, total in tally.sizes.items() if number else ():
        images = f"{number} image{'s' * (number != 1)}"
        asked = _words(column, value) + (f", balance {balance:g}" if balance else "")
        text = f"{args.model}, {asked}: {total / number:.2f} classes on average over {images}{new}"
        print(printable(text), file=sys.stderr)
        if below := tally.below[value]:
            text = (
                f"of these, {below:,} show{'s' * (below == 1)} no class that reaches the threshold: the best is listed"
            )
            text += " all the same"
            print(f"{text} (--min-size 0 leaves them empty)", file=sys.stderr)
        if column == "k" and number >= ENOUGH and total / number > LONGER * float(value):
            print(UNKNOWN, file=sys.stderr)
    if balance and number:
        print(
            "with a balance the scores of common classes are lowered, so they are no probabilities",
            file=sys.stderr,
        )
    if sum(tally.first.values()) >= ENOUGH:
        common = [f"{name} {count:,}" for name, count in tally.first.most_common(MOST_NAMES)]
        more = len(tally.first) - len(common)
        others = f" and {more:,} other class{'es' * (more > 1)}" if more else ""
        print(printable(f"named first: {', '.join(common)}{others}"), file=sys.stderr)
    if args.out and number:
        before = ", in place of the file that was there" * args.replaces
        before += ", as Parquet; a name that ends with .csv gives a spreadsheet" * to_folder
        print(printable(f"written to {args.out}{before}"), file=sys.stderr)
    say_left_out(tally.faults, tally.images, tally.left_out)


def _words(name: str, value: float | str) -> str:
    return f"{'K' if name == 'k' else name} = {value}"


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
