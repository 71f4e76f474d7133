"""Pictures of set predictions, from plain numbers: what sets look like, how large they are, what a larger K buys."""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..checks import is_number
from ..images import open_image
from ..shell import shortened
from .drawing import COLOURS, HATCHES, LINES, MOST_IN_TITLE, drawn_axis, look, pyplot, readable, save, whole

SIDE, GAP, LINE, HEADING = 1.6, 0.15, 0.115, 0.17  # of a contact sheet, in inches: image, between, line, of the title
MOST_BARS, LEAST_DRAWN = 14, 0.001  # sizes that are bars, more are a line; the smallest share that is shown
WIDTH, FILE_WIDTH, MOST_DRAWN = 23, 36, 320  # columns of a name and of a file's below an image, pixels of its side


def in_both_formats(picture: Callable[..., None], stem: Path, *data: Any, **options: Any) -> list[Path]:
    """Draw a picture as PNG and as SVG, and return the files; none for a picture that would be a single point."""
    files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    return [file for file in files if picture(*data, file, **options) is not False]


def _percent(found: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Means and half widths of intervals in percent, as `errorbar` takes them."""
    widths = [100 * (each["half_width"] or 0) for each in found]
    return {"y": [100 * each["mean"] for each in found], "yerr": widths if any(widths) else None}


def _single(values: Iterable[Sequence[Any]]) -> bool:
    """Whether no line has a second point, which makes no picture."""
    return all(len(points) < 2 for points in values)


def _number_axis(axis: Any, values: Sequence[float]) -> None:
    """Few values have a tick each; where they crowd at the small end, the scale is logarithmic."""
    if values and min(values) > 0 and median(values) < 0.4 * (min(values) + max(values)):
        axis.set_xscale("log")
    if len(values) <= 8:
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.minorticks_off()
    elif axis.get_xscale() == "linear" and max(values) - min(values) >= 4:
        axis.xaxis.get_major_locator().set_params(integer=True)


def contact_sheet(
    images: Sequence[Any],
    sets: Sequence[Sequence[int]],
    labels: Sequence[int] | None,
    names: Mapping[int, str] | Sequence[str],
    path: str | Path,
    scores: Sequence[Sequence[float]] | None = None,
    title: str = "Predicted sets, from clear to hopeless",
    columns: int = 6,
    rows: int = 4,
    most: int = 6,
    ordered: bool = True,
    lambda_val: float | None = None,
) -> None:
    """Images with their predicted sets below, from clear (small sets) to hopeless (large ones).

    Args:
        images: As `open_image` takes them; only those that are shown are opened. Their files are named below them.
        sets: The set of each image: class ids, best first.
        labels: The true class of each image, or None.
        names: Names of the classes.
        path: PNG or SVG to write.
        scores: Of the classes of each set.
        title: Above the images.
        columns: Images in a row.
        rows: Rows; the images shown are spread evenly over all given, ordered by set size.
        most: Classes written out below an image; the rest is counted.
        ordered: Whether to order and to choose; otherwise all images are shown as they come.
        lambda_val: The threshold: a set whose best class is below it is a guess, and comes last.
    """
    shown = list(range(len(images)))
    guessed = [lambda_val is not None and scores is not None and scores[i][0] < lambda_val for i in shown]
    if ordered:
        shown.sort(key=lambda i: (guessed[i], len(sets[i])))
        shown = [shown[i] for i in np.linspace(0, len(shown) - 1, min(rows * columns, len(shown))).astype(int)]
    files = _file_names([images[i] for i in shown], names)
    given = [[None if each is None else each[i] for i in shown] for each in (guessed, sets, labels, scores)]
    captions = [_caption(*each, names, most) for each in zip(files, *given, strict=True)]
    pictures = [_thumbnail(images[i]) for i in shown]
    tall = SIDE * min(1.0, max(0.6, median(height / width for width, height in (each.size for each in pictures))))
    columns, legend = min(columns, len(shown)), "\n✓ the true class, ✗ missed" + ", (✓) guessed" * any(given[0])
    lines = [[caption for caption, _ in captions[i : i + columns]] for i in range(0, len(shown), columns)]
    heights = [tall + GAP + LINE * (1 + max(caption.count("\n") for caption in row)) for row in lines]
    heading = whole(title, 20 * columns, MOST_IN_TITLE) + legend * (labels is not None)
    with readable([heading, *(text for both in captions for text in both)]) as plt:
        top = sum(heights)
        figure = plt.figure(figsize=((SIDE + GAP) * columns + GAP, top + HEADING * (heading.count("\n") + 2)))
        for number, picture in enumerate(pictures):
            row, column = divmod(number, columns)
            left, bottom = GAP + (SIDE + GAP) * column, top - sum(heights[:row]) - tall
            width, height = figure.get_size_inches()
            axis = figure.add_axes((left / width, bottom / height, SIDE / width, tall / height))
            _fill(axis, picture, tall)
            for text, at, align in zip(captions[number], (left, left + SIDE), ("left", "right"), strict=True):
                for line, part in enumerate(text.split("\n")):  # each by itself: scripts differ in their heights
                    y, small = bottom - 0.04 - LINE * (line + 0.8), files[number] and not line
                    how = {"fontsize": 5, "color": "0.45"} if small else {"fontsize": 6.5}
                    figure.text(at / width, y / height, part, ha=align, va="baseline", **how)
        figure.text(GAP / width, 1 - 0.1 / height, heading, fontsize=10, va="top")
        save(figure, path)


def _thumbnail(image: Any) -> Any:
    picture = open_image(image, "L" if getattr(image, "mode", "") == "L" else "RGB")
    picture.thumbnail((MOST_DRAWN, MOST_DRAWN))
    return picture


def _fill(axis: Any, picture: Any, tall: float) -> None:
    """Draw a picture in the middle of its place, which is grey where there is none of it."""
    wide, high = picture.size
    scale = max(wide / SIDE, high / tall)  # pixels of an inch
    left, above = (scale * SIDE - wide) / 2, (scale * tall - high) / 2
    axis.imshow(picture, cmap="gray")
    axis.set(xlim=(-left - 0.5, wide + left - 0.5), ylim=(high + above - 0.5, -above - 0.5), xticks=[], yticks=[])
    axis.set_facecolor("0.95")
    axis.spines[:].set_visible(False)


def _file_names(images: Sequence[Any], names: Mapping[int, str] | Sequence[str]) -> list[str]:
    """What the files of images are called, behind their folder if there are several and it is no class; or nothing."""
    known = set(names.values() if isinstance(names, Mapping) else names)
    found = [each.get("path") if isinstance(each, dict) else getattr(each, "filename", each) for each in images]
    files = [Path(file if isinstance(file, str | Path) else "") for file in found]
    several = len({file.parent for file in files}) > 1
    folders = [several and unicodedata.normalize("NFC", file.parent.name) not in known for file in files]
    parts = ["/".join(file.parts[-1 - folder :]) for file, folder in zip(files, folders, strict=True)]
    return [whole(shortened(name, FILE_WIDTH), 99) for name in parts]


def _caption(
    file: str, guessed: bool, classes: Any, label: int | None, scores: Any, names: Any, most: int
) -> tuple[str, str]:
    """What stands below an image, line by line: its file, names, and beside them their scores."""
    size = "0 classes, best guess:" if guessed else f"{len(classes)} class{'es' * (len(classes) != 1)}"
    left = [*([file] if file else []), size]
    right, tick = [""] * len(left), "(✓) " if guessed else "✓ "
    for place, j in enumerate(classes[:most]):
        name = whole(names[int(j)], WIDTH).split("\n")
        left += [(tick if j == label else "   ") + name[0], *(f"   {part}" for part in name[1:])]
        right += ["" if scores is None else f"{scores[place]:.2f}", *([""] * (len(name) - 1))]
    if len(classes) > most:
        left.append(f"   + {len(classes) - most} more" + " ✓" * (label in [int(j) for j in classes[most:]]))
    if label is not None and label not in [int(j) for j in classes]:
        name = whole(names[label], WIDTH).split("\n")
        left += ["✗ " + name[0], *(f"   {part}" for part in name[1:])]
    return "\n".join(left), "\n".join(right)


def set_size_histogram(counts: dict[str, Sequence[int]], path: str | Path, title: str = "Set sizes on test") -> None:
    """Percentage of images by set size, one series for each run or group of classes.

    Args:
        counts: For each series, how many images got a set of 0, 1, 2, ... classes; one that is alone needs no name.
        path: PNG or SVG to write.
        title: Above the axes.
    """
    width, largest = 0.8 / len(counts), 0
    with drawn_axis(path, "classes in the set", "% of images", title, height=3.8, names=counts, below=True) as axis:
        for i, (name, series) in enumerate(counts.items()):
            sizes, shares = np.arange(len(series)), np.asarray(series) / max(sum(series), 1)
            mean, number = f"mean {np.dot(sizes, shares):.2f}", f"{sum(series):,} images"
            label = f"{whole(name)} ({mean}, {number})" if name else f"{mean} classes, {number}"
            largest, shares = max(largest, *np.flatnonzero(shares >= LEAST_DRAWN), 1), 100 * shares
            if max(map(len, counts.values())) > MOST_BARS:
                axis.plot(sizes, shares, label=label, **look(i))
                continue
            places = sizes + (i - (len(counts) - 1) / 2) * width
            style = {"color": COLOURS[i % len(COLOURS)], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white"}
            bars = axis.bar(places, shares, width, label=label, **style)
            if len(counts) == 1:
                axis.bar_label(bars, [f"{share:.1f}" if share else "" for share in shares], fontsize=7)
        axis.set_xlim(-0.6, largest + 0.6)
        axis.xaxis.get_major_locator().set_params(integer=True)


def by_shot(set_sizes: dict[str, list[int]]) -> dict[str, list[int]]:
    """The series for few, medium and many shot classes, where there are such."""
    words = {"few": "under 20", "medium": "20 to 100", "many": "over 100"}
    return {f"{n} training images": set_sizes[name] for name, n in words.items() if sum(set_sizes.get(name, ()))}


def accuracy_curve(
    curves: dict[str, dict[float, dict[str, Any]]],
    path: str | Path,
    limits: dict[str, dict[float, float]] | None = None,
    title: str = "",
) -> bool:
    """Average-K accuracy against K, one line for each run or loss, with the interval over seeds where there is one.

    Args:
        curves: For each line, {K: `mean` and `half_width`}, the latter None for one seed.
        path: PNG or SVG to write.
        limits: {name: {K: accuracy}} of lines without intervals, e.g. the best possible.
        title: Above the axes.

    Returns:
        Whether there is anything to draw: one K makes no line.
    """
    if _single(curves.values()):
        return False
    labels = "K, average set size on validation", "true class in the set, on test (%)"
    with drawn_axis(path, *labels, title, height=4.2, names=[*curves, *(limits or {})]) as axis:
        for i, (name, curve) in enumerate(curves.items()):
            found = _percent(list(curve.values()))
            shift = 0.012 * (i - (len(curves) - 1) / 2) if found["yerr"] else 0  # so that intervals do not hide others
            axis.errorbar([k * (1 + shift) for k in curve], **found, capsize=2, label=whole(name), **look(i))
        for i, (name, limit) in enumerate((limits or {}).items()):
            values = [100 * value for value in limit.values()]
            axis.plot(list(limit), values, color="0.55", linestyle=LINES[-1 - i % 3][0], label=whole(name))
        _number_axis(axis, sorted({k for curve in curves.values() for k in curve}))
    return True


def tradeoff_curve(rows: Sequence[Sequence[float]], path: str | Path, title: str = "") -> bool:
    """Coverage against mean set size on validation, sets beside top-K.

    Args:
        rows: As `SetStatistics.curve` gives them: K, lambda_val, size, coverage, top-K accuracy.
        path: PNG or SVG to write.
        title: Above the axes.

    Returns:
        Whether there is anything to draw: a calibration for K = 1 only makes no line.
    """
    if len(rows) < 2:
        return False
    labels = "classes in a set, mean on validation", "sets with the true class (%)"
    with drawn_axis(path, *labels, title) as axis:
        sizes, coverages = [row[2] for row in rows], [100 * row[3] for row in rows]
        axis.plot(sizes, coverages, label="sets, of this size on average", **look(0))
        top = [(row[0], 100 * row[4]) for row in rows if float(row[0]).is_integer()]
        open_marks = {**look(0), "markerfacecolor": "white", "alpha": 0.6}
        axis.plot(*zip(*top, strict=True), label="top-K, so many for every image", **open_marks)
    return True


def balance_curves(rows: Sequence[Sequence[float | None]], path: str | Path, title: str = "") -> None:
    """What balances are worth, one panel for each K: all images, the mean over classes, and few-shot classes.

    Args:
        rows: `Calibration.tradeoff`: K, balance, these three (the last may be None), and the mean size.
        path: PNG or SVG to write.
        title: Above the panels.
    """
    ks = sorted({row[0] for row in rows})
    ks = [ks[i] for i in np.linspace(0, len(ks) - 1, min(6, len(ks))).round().astype(int)]
    size = {"figsize": (2.6 * len(ks) + 0.6, 3.4), "squeeze": False, "sharey": True, "layout": "constrained"}
    with readable([title]) as plt:
        figure, axes = plt.subplots(1, len(ks), **size)
        for axis, k in zip(axes[0], ks, strict=True):
            own = [row for row in rows if row[0] == k]
            for i, name in enumerate(("all images", "mean over classes", "few shot")):
                points = [(row[1], 100 * row[2 + i]) for row in own if row[2 + i] is not None]
                if points:
                    axis.plot(*zip(*points, strict=True), label=name, **look(i))
            axis.set(title=f"K = {k:g}", xlabel="balance")
            axis.grid(alpha=0.3)
        axes[0, 0].set_ylim(None, min(axes[0, 0].get_ylim()[1], 100.5))
        axes[0, 0].set_ylabel("true class in the set (%)")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(whole(title, 110), fontsize=10)
        save(figure, path)


def learning_curves(curves: dict[str, Sequence[dict[str, float]]], path: str | Path, title: str = "") -> bool:
    """Validation accuracy and validation loss after every epoch, one line for each loss.

    Losses have different scales, so each is divided by its own minimum: a line that rises from 1 shows overfitting.

    Args:
        curves: For each loss, points with `epoch`, `accuracy` and `loss`.
        path: PNG or SVG to write.
        title: Above the axes.

    Returns:
        Whether there is anything to draw: one epoch makes no line.
    """
    if _single(curves.values()):
        return False
    with readable([title, *curves]) as plt:
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="tight")
        for i, (name, points) in enumerate(curves.items()):
            epochs, least = [point["epoch"] for point in points], min(point["loss"] for point in points)
            axes[0].plot(epochs, [100 * point["accuracy"] for point in points], label=whole(name), **look(i))
            if least > 0:
                axes[1].plot(epochs, [point["loss"] / least for point in points], **look(i))
        labels = "validation average-K accuracy (%)", "validation loss / its minimum"
        for axis, label in zip(axes, labels, strict=True):
            axis.set(xlabel="epoch", ylabel=label)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].legend(frameon=False)
        figure.suptitle(whole(title, 110), fontsize=10)
        save(figure, path)
    return True


def set_size_course(monitor: Any, path: str | Path, name: str = "") -> None:
    """The mean set size of a stream of images with its confidence sequence, and the K that was calibrated.

    Args:
        monitor: What was seen: a `SetSizeMonitor`, e.g. `monitor` of the set pipeline.
        path: PNG or SVG to write.
        name: Of the model, for the title.
    """
    if len(monitor.history) < 2:
        raise ValueError(f"the monitor has seen {monitor.num_images} image(s), and a course takes two at least.")
    number, mean, low, high = np.asarray(monitor.history).T
    found = "drift" if monitor.drifted else "no drift" if monitor.enough else "too few images to tell"
    found = f"{found}, mean {monitor.mean:.2f} over {monitor.num_images} images"
    title = f"{name}, K = {monitor.k:g}: {found}" if name else found
    with drawn_axis(path, "images, in random order", "classes in the set", title, height=3.6) as axis:
        label = f"{100 * monitor.confidence:g}% interval, for all times together"
        axis.fill_between(number, low, high, facecolor="#BFDDEE", edgecolor=COLOURS[0], linewidth=0.5, label=label)
        axis.plot(number, mean, color=COLOURS[0], label="mean set size")
        axis.axhline(monitor.k, color=COLOURS[4], linestyle="--", label=f"K = {monitor.k:g}, calibrated")
        for sign, label in ((-1, None), (1, "drift: all of the interval lies beyond")):
            axis.axhline(monitor.k + sign * monitor.margin, color=COLOURS[4], linestyle=":", linewidth=1, label=label)
        axis.set(xscale="log", xlim=(1, max(monitor.num_images, 2)))
        axis.set_ylim(0, min(monitor.max_size, 3 * max(monitor.k, monitor.mean)))  # that of few images has no end
        axis.set_xticks(sorted({10**i for i in range(9) if 10**i < monitor.num_images} | {monitor.num_images}))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()


def export_bars(report: dict[str, Any], path: str | Path, title: str = "") -> None:
    """File size, accuracy and mean set size of exported graphs side by side.

    Args:
        report: What `export_onnx` returns; without measurements the sizes only.
        path: PNG or SVG to write.
        title: Above the panels.
    """
    names = list(report["bytes"])
    panels = {"file, MB": {"": [size / 1e6 for size in report["bytes"].values()]}}
    shown = {"average-K accuracy (%)": ("average_k_accuracy", 100), "mean set size": ("mean_set_size", 1)}
    for panel, (metric, factor) in shown.items() if "measured" in report else ():
        panels[panel] = {
            f"K = {key}": [factor * report["measured"][name][f"{metric}@{key}"] for name in names]
            for key in report["thresholds"]
        }
    widths = [1, *(2 for _ in list(panels)[1:])]
    options = {"width_ratios": widths, "squeeze": False, "layout": "constrained"}
    figure, axes = pyplot().subplots(1, len(panels), figsize=(2.2 * sum(widths), 3.3), **options)
    for axis, (panel, groups) in zip(axes[0], panels.items(), strict=True):
        for i, name in enumerate(names):
            places = np.arange(len(groups)) + 0.4 * (i - (len(names) - 1) / 2)
            heights = [values[i] for values in groups.values()]
            bars = axis.bar(places, heights, 0.38, color=COLOURS[i], hatch=HATCHES[i], edgecolor="white", label=name)
            axis.bar_label(bars, fmt="%.1f" if groups.keys() - {""} else "%.2f", fontsize=7)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.set_title(panel, fontsize=10, loc="left")
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    shared = axes[0, 0].get_legend_handles_labels()
    figure.legend(*shared, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(whole(title, 110), fontsize=11, x=0.02, ha="left")
    save(figure, path)


def sweep_curve(points: Sequence[dict[str, Any]], path: str | Path, name: str) -> bool:
    """Validation accuracy against the values of one hyperparameter, with the interval over seeds.

    Args:
        points: For each value `value`, `mean` and `half_width`, the latter None for one seed.
        path: PNG or SVG to write.
        name: The hyperparameter.

    Returns:
        Whether there is anything to draw: one value makes no line.
    """
    if len(points) < 2:
        return False
    numbers = all(is_number(point["value"]) for point in points)
    points = sorted(points, key=lambda point: point["value"]) if numbers else points
    values = [point["value"] for point in points]
    title = f"Validation accuracy against {name}, mean and 95% interval over seeds"
    with drawn_axis(path, name, "validation average-K accuracy (%)", title) as axis:
        places = values if numbers else list(range(len(values)))
        axis.errorbar(places, **_percent(points), marker="o", color=COLOURS[0], capsize=3)
        if numbers:
            _number_axis(axis, values)
        else:
            axis.set_xticks(places, [whole(str(value), 20) for value in values])
    return True
