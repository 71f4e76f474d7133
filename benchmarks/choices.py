"""`python -m benchmarks.choices`: what coverage is worth when epoch and head are chosen on the images it comes from.

Trains AVG-K on glyphs with several seeds (a minute each on 2 idle cores), keeps the weights of every epoch, and draws
validation sets of several sizes many times. Epoch and head, 6 x 3 of them, are chosen by average-3 accuracy and the
threshold is computed on the same images, or on one half each (`calibration_split: auto`). Printed is the share of
test images whose set holds the true class: mean over draws and, in brackets, standard deviation.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from avgk_hf import AvgKForImageClassification, average_k_threshold, load_splits, prepare
from avgk_hf.cli import main as avgk
from avgk_hf.conformal import LEVELS
from avgk_hf.scores import all_scores, head_logits
from avgk_hf.study.columns import as_table

RECIPE, K = "recipes/glyphs/avgk.yaml", 3
SIZES = (200, 400, 800, 1600)
Scores = dict[tuple[str, str], torch.Tensor]  # {(epoch, head): (n, L)}


def train(folder: Path, seed: int) -> None:
    """Train with this seed, unless it was done before."""
    flags = {"seed": seed, "glyphs_seed": seed, "head": "auto", "save_total_limit": 100, "output_dir": folder}
    if not (folder / "results.json").is_file():
        avgk(["train", RECIPE, *(f"--{name}={value}" for name, value in flags.items())])


@torch.no_grad()
def scores_of(folder: Path, seed: int) -> tuple[dict[str, Scores], dict[str, torch.Tensor]]:
    """The scores of every epoch and head, and the labels, for validation and test."""
    splits, found, labels = load_splits("glyphs", seed=seed), {"validation": {}, "test": {}}, {}
    for checkpoint in folder.glob("checkpoint-*"):
        model = AvgKForImageClassification.from_pretrained(checkpoint).eval()
        for name, scores in found.items():
            labels[name] = torch.tensor(splits[name]["label"])
            parts = []
            for start in range(0, len(splits[name]), 500):
                rows = prepare(splits[name], model.config)[start : start + 500]
                parts.append(all_scores(*head_logits(model(torch.stack(rows["pixel_values"]))), "softmax"))
            for head in parts[0]:
                scores[checkpoint.name, head] = torch.cat([part[head] for part in parts])
    return found, labels


def reached(
    validation: Scores, test: Scores, labels: dict[str, torch.Tensor], choose: np.ndarray, calibrate: np.ndarray
) -> list[float]:
    """For each level the coverage on test, with epoch and head chosen on some rows and calibrated on others."""

    def true(scores: torch.Tensor, split: str, rows: np.ndarray) -> torch.Tensor:
        return scores[rows, labels[split][rows]]

    def accuracy(scores: torch.Tensor) -> float:
        return float((true(scores, "validation", choose) >= average_k_threshold(scores[choose], K)).float().mean())

    best = max(validation, key=lambda key: accuracy(validation[key]))
    own = true(validation[best], "validation", calibrate).sort(descending=True).values
    everything = np.arange(len(labels["test"]))
    places = [int(np.ceil((len(calibrate) + 1) * level - 1e-9)) - 1 for level in LEVELS]
    return [float((true(test[best], "test", everything) >= own[place]).float().mean()) for place in places]


def main() -> None:
    """Train what is missing, draw, and print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.choices", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (%(default)s)")
    parser.add_argument("--draws", type=int, default=40, help="validation sets of each size and seed (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/choices"), help="folder of the trainings (%(default)s)")
    args = parser.parse_args()
    found: dict[tuple[int, str], list[list[float]]] = {}
    for seed in range(args.seeds):
        train(args.out / f"seed-{seed}", seed)
        scores, labels = scores_of(args.out / f"seed-{seed}", seed)
        rng = np.random.default_rng(seed)
        for size in SIZES * args.draws:
            rows = rng.permutation(len(labels["validation"]))[:size]
            halves = rows[: size // 2], rows[size // 2 :]
            for how, parts in (("the same images", (rows, rows)), ("half each", halves)):
                found.setdefault((size, how), []).append(reached(*scores.values(), labels, *parts))
    rows = []
    for (size, how), draws in found.items():
        means, deviations = 100 * np.mean(draws, 0), 100 * np.std(draws, 0)
        cells = [f"{mean:.1f} ({deviation:.1f})" for mean, deviation in zip(means, deviations, strict=True)]
        rows.append([str(size), how, *cells])
    print(as_table(["validation images", "chosen and calibrated on", *(f"asked {100 * c:g}%" for c in LEVELS)], rows))


if __name__ == "__main__":
    main()
