"""Pictures of classes: how many images each has, and which are listed together."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .drawing import COLOURS, HATCHES, drawn_axis, readable, save, whole


def confusion_groups(groups: Sequence[Sequence[str]], shares: np.ndarray, path: str | Path, title: str = "") -> None:
    """Classes that are listed together: of the images of each, by row, the share whose sets hold each other one.

    Args:
        groups: Names of the classes of each group.
        shares: (m, m) for the m classes of all groups in their order.
        path: PNG or SVG to write.
        title: Above the axes.
    """
    names = [whole(name, 34) for group in groups for name in group]
    with readable([title, *names]) as plt:
        side = 1.6 + 0.34 * len(names)
        figure, axis = plt.subplots(figsize=(side + 2.4, side + 0.4), layout="constrained")
        axis.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.005:
                colour = "white" if share > 0.6 else "black"
                axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
        start = 0
        for group in groups:
            corner, size = (start - 0.5, start - 0.5), len(group)
            axis.add_patch(plt.Rectangle(corner, size, size, fill=False, linewidth=1.6, edgecolor=COLOURS[4]))
            start += size
        axis.set_yticks(range(len(names)), [f"{name}  {number}" for number, name in enumerate(names, 1)], fontsize=8)
        axis.set_xticks(range(len(names)), range(1, len(names) + 1), fontsize=8)
        axis.tick_params(length=0)
        axis.set(xlabel="class in the set", ylabel="true class")
        axis.set_title(whole(title + " (% of its images)", 60), fontsize=10, loc="left")
        save(figure, path, bbox_inches="tight")


def count_bars(names: Sequence[str], counts: dict[str, np.ndarray], path: str | Path) -> None:
    """The images of each class, most first, in every split, with the bounds of few, medium and many shot.

    Args:
        names: Of the classes; written where there are 60 at most.
        counts: {split: images of each class (L,)}, that of the training first where it is called train.
        path: PNG or SVG to write.
    """
    first = counts.get("train", next(iter(counts.values())))
    order, places = np.argsort(-first, kind="stable"), np.arange(len(names))
    named = len(names) <= 60
    labels, height = ("images", "" if named else "class"), max(3.8, 0.2 * len(names)) if named else 5
    with drawn_axis(path, *labels, height=height, names=names if named else ()) as axis:
        width = 0.8 / len(counts)
        for i, (split, each) in enumerate(counts.items()):
            drawn = {"color": COLOURS[i % len(COLOURS)], "hatch": HATCHES[i % len(HATCHES)], "height": width}
            drawn |= {"edgecolor": "0.2", "linewidth": 0.3}
            axis.barh(places + (i - (len(counts) - 1) / 2) * width, each[order], **drawn, label=f"{split} images")
        for bound in (20, 100):
            axis.axvline(bound, color="0.3", linestyle=":", linewidth=1)
        axis.set_xscale("symlog", linthresh=10)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.invert_yaxis()
        if named:
            axis.set_yticks(places, [whole(names[i]) for i in order], fontsize=7)
