"""How long commands take to start, against importing torch and transformers alone."""

import resource
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from avgk_hf import AvgKForImageClassification
from avgk_hf.calibration import Calibration

from .measure import Table, progress

ROUNDS = 3
# transformers imports nothing before a name of it is asked for: these are what any program for classifiers asks for
BARE = "import torch\nfrom transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer"
COMMAND = "import sys\nfrom avgk_hf.cli import main\nmain(sys.argv[1:])"


# the same command, which ends with the first line that it prints
UNTIL_SAID = """
import builtins, os, sys
said = print
builtins.print = lambda *words, **how: (said(*words), sys.stdout.flush(), os._exit(0))
from avgk_hf.cli import main
main(sys.argv[1:])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def seconds(program: str, *arguments: str) -> float:
    """CPU time of a program in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run() -> Iterator[Table]:
    """One row for every command."""
    progress("startup")
    with tempfile.TemporaryDirectory() as place:
        model = AvgKForImageClassification.from_timm("test_resnet", num_labels=2, k=1, image_size=32)
        Calibration.store(model.config, {1: 0.5})
        model.config.id2label = {0: "ash", 1: "oak"}
        model.save_pretrained(f"{place}/model")
        rng = np.random.default_rng(0)
        for name in ("ash", "oak"):
            Path(f"{place}/trees/test/{name}").mkdir(parents=True)
            Image.fromarray(rng.integers(0, 255, (24, 24, 3), dtype=np.uint8)).save(f"{place}/trees/test/{name}/0.png")
        programs = {
            "avgk predict, with one image": (COMMAND, "predict", f"{place}/model", f"{place}/trees/test/ash/0.png"),
            "avgk evaluate, with two": (COMMAND, "evaluate", f"{place}/model", f"{place}/trees"),
            "avgk train, all of its imports": ("import avgk_hf.train",),
            "avgk compare, all of its imports": ("import avgk_hf.study.runner",),
            "avgk app, until it says what it shows": (UNTIL_SAID, "app", f"{place}/model", "--port", str(free_port())),
            "avgk app, with Gradio, which it imports then": ("import avgk_hf.app.page",),
            "avgk predict of a model that is not there": (COMMAND, "predict", "./nowhere", "a.png"),
        }
        measured = {name: [] for name in programs}
        for _ in range(ROUNDS):
            bare = seconds(BARE)
            for name, program in programs.items():
                measured[name].append(seconds(*program) / bare)
    table = Table(
        "Time to start",
        "CPU time of a fresh process, the small work included, divided by that of one that imports torch, and from"
        " transformers the Auto classes of image classification and the Trainer. Gradio, which only the page needs"
        " and which is imported when the model has been loaded and named, has no bound."
        f" The median of {ROUNDS} rounds.",
    )
    for name, ratios in measured.items():
        bound = "" if "Gradio" in name else "<= 0.3" if "not there" in name else "<= 1.3"
        table.add(name, statistics.median(ratios), bound)
    yield table
