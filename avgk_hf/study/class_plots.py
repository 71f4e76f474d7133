"""Pictures of classes: how many images each has, and which are listed together."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .drawing import COLOURS, HATCHES, drawn_axis, readable, save, whole


def confusion_groups(
    groups: Sequence[Sequence[str]],
    shares: np.ndarray,
    images: Sequence[int],
    path: str | Path,
    title: str = "",
    classes: int | None = None,
    crowded: int = 0,
) -> None:
    """Classes that are listed together: of the images of each, by row, the share whose sets hold each other one.

    Args:
        groups: Names of the classes of each group; one of a single class has no box.
        shares: (m, m) for the m classes of all groups in their order.
        images: How many each of these has.
        path: PNG or SVG to write.
        title: Above the axes.
        classes: How many there are in all, L; those that are not drawn are counted.
        crowded: How many of these belong to a group for which there was no room.
    """
    names = [whole(name, 34) for group in groups for name in group]
    side = 1.6 + 0.34 * len(names)
    width, places, left = max(side + 2.4, 6.0), range(len(names)), (classes or 0) - len(names)
    rows = [f"{name} ({number:,})" for name, number in zip(names, images, strict=True)]
    text = (
        "How to read it: a row holds the photographs of one class, as many as stand behind its name; a number is the"
        " percentage of them whose set lists the class of the column; on the diagonal that is the class itself. A box"
        " holds classes that are often listed together, on average over its pairs; others may be close to one of them."
    )
    if left > 0:
        reason = "of the images of any pair with them, fewer than a tenth list both"
        reason += f", or there was no room, as for {crowded:,}" if crowded else ""
        text += f" {left:,} of {classes:,} classes are not drawn: {reason}. The table beside it has all of them."
    with readable([title, *names]) as plt:
        figure, axis = plt.subplots(figsize=(width, side + 2), layout="constrained")
        axis.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                how = {"ha": "center", "va": "center", "fontsize": 7, "color": "white" if share > 0.6 else "black"}
                axis.text(column, row, f"{math.floor(100 * share + 0.5)}", **how)
        start = 0
        for group in groups:
            corner, size = (start - 0.5, start - 0.5), len(group)
            if size > 1:
                axis.add_patch(plt.Rectangle(corner, size, size, fill=False, linewidth=1.6, edgecolor=COLOURS[4]))
            start += size
        axis.set_yticks(places, rows, fontsize=8)
        axis.set_xticks(places, names, fontsize=8, rotation=90)
        axis.tick_params(length=0)
        axis.set(xlabel="class in the set", ylabel="true class")
        at = {"x": 0.02, "ha": "left"}
        figure.suptitle(whole(title, round(11 * width)), fontsize=10, **at)
        figure.supxlabel("\n".join(textwrap.wrap(text, round(15 * width))), fontsize=8, **at)
        save(figure, path)


def count_bars(names: Sequence[str], counts: dict[str, np.ndarray], path: str | Path, title: str = "") -> None:
    """The images of each class, most first, in every split, with the bounds of few, medium and many shot.

    Args:
        names: Of the classes; written, with the counts, where there are 60 at most.
        counts: {split: images of each class (L,)}, that of the training first where it is called train.
        path: PNG or SVG to write.
        title: Above the axes.
    """
    first = counts.get("train", next(iter(counts.values())))
    order, places = np.argsort(-first, kind="stable"), np.arange(len(names))
    named = len(names) <= 60
    labels = "images, logarithmic from 10 on", "" if named else "class"
    height = max(3.8, max(0.2, 0.1 * len(counts)) * len(names) + 1.4) if named else 5
    with drawn_axis(path, *labels, title, height, names if named else (), below=True) as axis:
        width = 0.8 / len(counts)
        for i, (split, each) in enumerate(counts.items()):
            drawn = {"color": COLOURS[i % len(COLOURS)], "hatch": HATCHES[i % len(HATCHES)], "height": width}
            drawn |= {"edgecolor": "0.2", "linewidth": 0.3}
            at = places + (i - (len(counts) - 1) / 2) * width
            bars = axis.barh(at, each[order], **drawn, label=f"{split} images")
            if named:
                white = {"facecolor": "white", "edgecolor": "none", "pad": 0}
                axis.bar_label(bars, [f"{n:,}" for n in each[order]], padding=1.5, fontsize=5.5, bbox=white)
        for bound, style, words in ((20, ":", "left of it few shot"), (100, "--", "right of it many shot")):
            axis.axvline(bound, color="0.3", linestyle=style, linewidth=1, label=f"{bound} images, {words}")
        axis.set_xscale("symlog", linthresh=10)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        most = max(100, *(each.max() for each in counts.values()))
        factors = (1, 2, 5) if most < 2000 else (1,)
        axis.set_xticks([0, 5, *(factor * 10**power for power in range(1, 9) for factor in factors)])
        axis.set_xlim(0, 1.5 * most)
        axis.invert_yaxis()
        if named:
            axis.set_yticks(places, [whole(names[i]) for i in order], fontsize=7)
