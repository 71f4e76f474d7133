"""Pictures of set predictions: what the sets look like, and how large they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MARKS = [("", "0.35"), ("///", "0.85"), ("...", "0.6"), ("xx", "0.95")]  # hatch and grey: readable without colour


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: `pip install 'avgk_hf[demo]'`.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def contact_sheet(
    images: Sequence[Any],
    sets: Sequence[Sequence[int]],
    labels: Sequence[int],
    names: Sequence[str],
    path: str | Path,
    columns: int = 6,
    rows: int = 4,
    most: int = 7,
) -> None:
    """Images with their predicted sets below, from clear (small sets) to hopeless (large ones).

    Args:
        images: Pillow images.
        sets: The set of each image: class ids, best first.
        labels: The true class of each image.
        names: Names of the classes.
        path: PNG or SVG to write.
        columns: Images in a row.
        rows: Rows; the images shown are spread evenly over all given, ordered by set size.
        most: Classes written out below an image; the rest is counted.
    """
    plt = _pyplot()
    order = sorted(range(len(images)), key=lambda i: len(sets[i]))
    shown = [order[i] for i in np.linspace(0, len(order) - 1, min(rows * columns, len(order))).astype(int)]
    figure, axes = plt.subplots(rows, columns, figsize=(1.75 * columns, 2.55 * rows), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, i in zip(axes.flat, shown, strict=False):
        axis.imshow(images[i], cmap="gray" if images[i].mode == "L" else None)
        axis.set_title(f"{len(sets[i])} class{'es' * (len(sets[i]) != 1)}", fontsize=8, loc="left", pad=2)
        hit = labels[i] in sets[i]
        lines = [("✓ " if j == labels[i] else "   ") + _short(names[j]) for j in sets[i][:most]]
        if len(sets[i]) > most:
            lines.append(f"   + {len(sets[i]) - most} more" + (" ✓" if labels[i] in sets[i][most:] else ""))
        if not hit:
            lines.append("✗ " + _short(names[labels[i]]))
        axis.text(0, -0.04, "\n".join(lines), transform=axis.transAxes, va="top", fontsize=6.5, linespacing=1.25)
    figure.suptitle(
        "Predicted sets, from clear to hopeless (✓ the true class, ✗ missed)", fontsize=10, x=0.01, y=0.995, ha="left"
    )
    figure.subplots_adjust(left=0.01, right=0.995, top=0.94, bottom=0.1, wspace=0.3, hspace=0.8)
    _save(figure, path)


def _short(name: str, most: int = 26) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def set_size_histogram(counts: dict[str, Sequence[int]], path: str | Path, title: str = "Set sizes") -> None:
    """Share of images by set size, one series for each run or group of classes.

    Args:
        counts: For each series, how many images got a set of 0, 1, 2, ... classes.
        path: PNG or SVG to write.
        title: Above the axes.
    """
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 3.6))
    longest = max(map(len, counts.values()))
    width = 0.8 / len(counts)
    for i, (name, series) in enumerate(counts.items()):
        share = np.zeros(longest)
        share[: len(series)] = np.asarray(series) / max(sum(series), 1)
        hatch, grey = MARKS[i % len(MARKS)]
        mean = np.average(np.arange(len(series)), weights=series) if sum(series) else 0.0
        places = np.arange(longest) + (i - (len(counts) - 1) / 2) * width
        axis.bar(places, share, width, label=f"{name} (mean {mean:.2f})", color=grey, edgecolor="black", hatch=hatch)
    axis.set(xlabel="classes in the set", ylabel="share of images", title=title)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    figure.tight_layout()
    _save(figure, path)


def _save(figure: Any, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    _pyplot().close(figure)
