"""Predicting many images, from files to shards, against a bare loop over the same loader and model."""

import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from PIL import Image

from avgk_hf import AvgKForImageClassification
from avgk_hf.calibration import Calibration
from avgk_hf.classifiers import forward
from avgk_hf.data.sources import Source
from avgk_hf.prediction import Predictor, Shards
from avgk_hf.questions import Question

from .measure import MIB, Table, peak_rss_growth, progress
from .reading import write_plantnet

NUM_LABELS, SIZE, BATCH, ROUNDS = 1_081, 128, 32, 7
BACKBONES = ("resnet18", "tf_efficientnet_lite0", "vit_small_patch16_224")
FEW, MANY, SOME = 1_000, 10_000, 96  # images whose memory is compared, and whose time is taken


def predictor(name: str, workers: int = 0, **model: int) -> Predictor:
    """An untrained model whose sets have 5 classes on average, or so: what they cost does not depend on weights."""
    torch.manual_seed(0)
    made = AvgKForImageClassification.from_timm(name, num_labels=NUM_LABELS, k=5, pretrained=False, **model)
    Calibration.store(made.config, {5: 1 / NUM_LABELS})
    return Predictor(made, [Question(min_size=1, max_size=5)], BATCH, workers)


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU of this process and of those that it started and that ended."""

    def used() -> float:
        return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    start, before = time.perf_counter(), used()
    function()
    return time.perf_counter() - start, used() - before


def bare(own: Predictor, source: Source) -> None:
    """The loop that anybody would write: read, compute, forget."""
    with torch.inference_mode():
        for batch in own.loader([(0, source.pieces())], source, own.workers):
            for images in batch.images:
                forward(own.model, images)


def compared(own: Predictor, source: Source, folder: Path) -> list[dict[str, tuple[float, float]]]:
    """Times of both, round by round."""
    rounds = []
    for i in range(ROUNDS):
        shards = Shards(folder / f"{own.workers}-{i}", own, source, 64)
        both = {
            "ours": lambda shards=shards: shards.write(shards.missing(), shown=False),
            "bare": lambda: bare(own, source),
        }
        rounds.append({name: timed(both[name]) for name in sorted(both, reverse=i % 2 == 1)})
    return rounds


def memory(number: int) -> Iterator[None]:
    """Predict so many images of 32 x 32, for `peak_rss_growth`."""
    own = predictor("test_resnet", image_size=32)
    with tempfile.TemporaryDirectory() as folder:
        Image.new("RGB", (32, 32)).save(Path(folder) / "a.png")
        (Path(folder) / "list.txt").write_text("a.png\n" * number)
        (Path(folder) / "some.txt").write_text("a.png\n" * 500)
        for name in ("some", "list"):  # what the first shard makes stays
            if name == "list":
                yield
            shards = Shards(Path(folder) / name, own, Source([f"{folder}/{name}.txt"]), 500)
            shards.write(shards.missing(), shown=False)


def run() -> Iterator[Table]:
    """Images per second as ratios, of three backbones as figures, and what grows with the images."""
    table = Table(
        "Predicting many images",
        "Images per second of `avgk predict --out FOLDER`, from files to Parquet shards, divided by those of a bare"
        f" loop over the same DataLoader and model: resnet18 at {SIZE} pixels, L = {NUM_LABELS}, JPEGs of 500 x 400 in"
        f" batches of {BATCH}, one thread, the median of {ROUNDS} rounds. By CPU time over all processes, and by the"
        " clock, where other programs on the machine count too.",
    )
    with tempfile.TemporaryDirectory() as folder:
        progress("scale, writing the images")
        write_plantnet(Path(folder))
        source = Source([f"{folder}/images/train"])
        for workers in (0, 2):
            progress(f"scale, {workers} workers")
            rounds = compared(predictor("resnet18", workers, image_size=SIZE), source, Path(folder))
            for place, what in ((1, "by CPU time"), (0, "by the clock")):
                ratio = statistics.median(taken["bare"][place] / taken["ours"][place] for taken in rounds)
                table.add(f"{workers} workers, {what}: times the bare loop", ratio, ">= 0.95")
        yield table
        table = Table(
            "Images per second of one core",
            f"The same command, images divided by seconds of CPU over all processes: decoding, resizing, the model at"
            f" 224 pixels, sets, shards; {SOME} JPEGs of 500 x 400, L = {NUM_LABELS}, one thread, no worker.",
        )
        (shard, *_) = source.shards(SOME)
        for name in BACKBONES:
            progress(f"scale, {name}")
            shards = Shards(Path(folder) / name, predictor(name, image_size=224), source, SOME)
            seconds = timed(lambda shards=shards: shards.write([(0, shard)], shown=False))[1]
            table.add(name, SOME / seconds)
        yield table
    progress("scale, memory")
    table = Table(
        "Memory of predicting many images",
        f"MiB by which the peak resident memory of a process grows over shards of 500 images of 32 x 32 pixels, L ="
        f" {NUM_LABELS}, after a first shard. What was kept of every image would show in the second row.",
    )
    grown = {number: peak_rss_growth(memory, number) / MIB for number in (FEW, MANY)}
    table.add(f"n = {FEW}", grown[FEW])
    table.add(f"n = {MANY}", grown[MANY], "<= 20")
    yield table
