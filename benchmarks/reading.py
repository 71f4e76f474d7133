"""Reading images through `load_splits`, `prepare` and the Trainer's loader, against torchvision's ImageFolder."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from avgk_hf import AvgKForImageClassification, AvgKTrainer, AvgKTrainingArguments, load_splits, prepare

from .measure import Table, progress

IMAGES, SPECIES, BATCH = 1024, 16, 32
WIDTH, HEIGHT = 500, 400
ROUNDS = 7


def write_plantnet(folder: Path) -> None:
    """Pl@ntNet-300K's layout with generated JPEGs: smooth shapes and some noise, about 60 kB each."""
    rng = np.random.default_rng(0)
    names = {str(1355868 + 7 * i): f"Species {i:02d}" for i in range(SPECIES)}
    (folder / "plantnet300K_species_id_2_name.json").write_text(json.dumps(names))
    for split, count in (("train", IMAGES), ("val", SPECIES), ("test", SPECIES)):
        for i in range(count):
            coarse = Image.fromarray(rng.integers(0, 256, (10, 12, 3), dtype=np.uint8))
            pixels = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.float32)
            pixels += rng.normal(0, 12, pixels.shape)
            place = folder / "images" / split / list(names)[i % SPECIES]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{i:05d}.jpg", quality=85)


def loaders(folder: Path, workers: int) -> dict[str, DataLoader]:
    """Our loader and the bare one: the same files, transform, batch size and number of workers, both shuffled."""
    data = prepare(load_splits(str(folder))["train"], model_config(), "resize_crop")
    args = AvgKTrainingArguments(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=BATCH,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    model = AvgKForImageClassification.from_timm("test_resnet", num_labels=SPECIES, k=2)
    ours = AvgKTrainer(model=model, args=args, train_dataset=data).get_train_dataloader()
    transform = data.format["format_kwargs"]["transform"].transform
    bare = DataLoader(
        ImageFolder(folder / "images" / "train", transform),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return {"ours": ours, "bare": bare}


def model_config() -> object:
    """The config of the recipes' model, which says how images are prepared."""
    return AvgKForImageClassification.from_timm("resnet18.tv_in1k", num_labels=SPECIES, k=2, pretrained=False).config


def pass_over(loader: DataLoader) -> Callable[[], float]:
    """A function that reads all images once and returns the seconds; worker processes stay alive in between."""

    def read() -> float:
        start = time.perf_counter()
        for _ in loader:
            pass
        return time.perf_counter() - start

    return read


def run() -> Iterator[Table]:
    """Images per second, as ratios of ours to the bare loop."""
    table = Table(
        "Reading images",
        f"Images per second of the Trainer's own loader on Pl@ntNet-300K's layout, divided by those of a bare loop over"
        f" torchvision's `ImageFolder` and `DataLoader` with the same transform (decode, resize to 256, random crop of"
        f" 224, normalise), workers and batches of {BATCH}: {IMAGES} JPEGs of {WIDTH} x {HEIGHT}, in the page cache."
        f" Wall-clock time, because the work is done in worker processes; the median of {ROUNDS} rounds, each with both"
        " in turn.",
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        progress("reading, writing the images")
        write_plantnet(Path(folder))
        for workers in (0, 2):
            progress(f"reading, {workers} workers")
            readers = {name: pass_over(loader) for name, loader in loaders(Path(folder), workers).items()}
            for read in readers.values():
                read()  # starts the workers and fills the page cache
            seconds: dict[str, list[float]] = {name: [] for name in readers}
            for i in range(ROUNDS):
                for name in sorted(readers, reverse=i % 2 == 1):  # whichever is first must not always be the same
                    seconds[name].append(readers[name]())
            ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["bare"], strict=True))
            progress(f"reading, {workers} workers: {IMAGES / statistics.median(seconds['ours']):.0f} images/s")
            table.add(f"{workers} workers: times the images per second of the bare loop", ratio, ">= 0.95")
    yield table
