"""Reading images through `load_splits`, `prepare` and the Trainer's loader, against torchvision's ImageFolder."""

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from avgk_hf import AvgKForImageClassification, AvgKTrainer, AvgKTrainingArguments, load_splits, prepare

from .measure import Table, progress

IMAGES, SPECIES, BATCH = 256, 16, 32
WIDTH, HEIGHT = 500, 400
ROUNDS = 15


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
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), inplace=True)
    steps = [transforms.Resize(256), transforms.RandomCrop(224), transforms.ToTensor(), normalize]
    bare = DataLoader(
        ImageFolder(folder / "images" / "train", transforms.Compose(steps)),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return {"ours": ours, "bare": bare}


def model_config() -> object:
    """The config of the recipes' model, which says how images are prepared."""
    return AvgKForImageClassification.from_timm("resnet18.tv_in1k", num_labels=SPECIES, k=2, pretrained=False).config


def read(loader: DataLoader, workers: list[psutil.Process]) -> tuple[float, float]:
    """Read all images once; (wall-clock seconds, CPU seconds of this process and the loader's workers)."""

    def used() -> float:
        return time.process_time() + sum(sum(worker.cpu_times()[:2]) for worker in workers)

    start, before = time.perf_counter(), used()
    for _ in loader:
        pass
    return time.perf_counter() - start, used() - before


def run() -> Iterator[Table]:
    """Images per second, as ratios of ours to the bare loop."""
    table = Table(
        "Reading images",
        "Images per second of the Trainer's own loader on Pl@ntNet-300K's layout, divided by those of a bare loop over"
        " torchvision's `ImageFolder` and `DataLoader` with the same transform (decode, resize to 256, random crop of"
        f" 224, normalise), workers and batches of {BATCH}: {IMAGES} JPEGs of {WIDTH} x {HEIGHT}, in the page cache,"
        f" the median of {ROUNDS} rounds. By CPU time over all processes, and by the clock, where other programs on"
        " the machine count too. Without workers nothing is promised: the recipes have 4 and 8.",
    )
    with tempfile.TemporaryDirectory() as folder:
        progress("reading, writing the images")
        write_plantnet(Path(folder))
        for workers in (0, 2):
            progress(f"reading, {workers} workers")
            children: dict[str, list[psutil.Process]] = {}
            made = loaders(Path(folder), workers)
            for name, loader in made.items():
                known = {process.pid for processes in children.values() for process in processes}
                read(loader, [])  # starts the workers, which then stay
                children[name] = [
                    psutil.Process(child.pid) for child in multiprocessing.active_children() if child.pid not in known
                ]
            rounds = []
            for i in range(ROUNDS):
                order = sorted(made, reverse=i % 2 == 1)  # whichever is first must not always be the same
                rounds.append({name: read(made[name], children[name]) for name in order})
            rate = IMAGES / statistics.median(taken["ours"][0] for taken in rounds)
            progress(f"reading, {workers} workers: {rate:.0f} images per second here")
            for place, what in ((1, "by CPU time"), (0, "by the clock")):
                ratio = statistics.median(taken["bare"][place] / taken["ours"][place] for taken in rounds)
                table.add(f"{workers} workers, {what}: times the bare loop", ratio, ">= 0.95" if workers else "")
    yield table
