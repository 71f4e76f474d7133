"""Pictures of set predictions, from plain numbers: what sets look like, how large they are, what a larger K buys."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..checks import is_number
from ..files import new_file

LINES = [("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (1, 1)), "v"), ((0, (5, 1)), "x")]
MARKS = [("", "0.35"), ("///", "0.85"), ("...", "0.6"), ("xx", "0.95")]  # hatch and grey: readable without colour


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: `pip install 'avgk_hf[demo]'`.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def in_both_formats(picture: Callable[..., None], stem: Path, *data: Any, **options: Any) -> list[Path]:
    """Draw a picture as PNG and as SVG, and return the files."""
    files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    for file in files:
        picture(*data, file, **options)
    return files


@contextmanager
def _axis(path: str | Path, xlabel: str, ylabel: str, title: str = "", height: float = 3.8) -> Iterator[Any]:
    """Axes to draw on, which are then labelled and written."""
    figure, axis = _pyplot().subplots(figsize=(7, height), layout="tight")
    yield axis
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)
    _save(figure, path)


def _save(figure: Any, path: str | Path) -> None:
    path = Path(path)
    with new_file(path if path.suffix else path.with_name(f"{path.name}.png")) as new:
        figure.savefig(new, dpi=130)
    _pyplot().close(figure)


def _look(i: int) -> dict[str, Any]:
    """How the i-th line looks."""
    style, marker = LINES[i % len(LINES)]
    return {"linestyle": style, "marker": marker, "color": str(0.15 * (i % 4)), "markersize": 4}


def _short(name: str, most: int = 60) -> str:
    """A name as it can be drawn: matplotlib would read `$` as mathematics."""
    name = "".join(c if c.isprintable() else " " for c in name)
    return (name if len(name) <= most else name[: most - 1] + "…").replace("$", r"\$")


def _percent(found: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Means and half widths of intervals in percent, as `errorbar` takes them."""
    widths = [100 * (each["half_width"] or 0) for each in found]
    return {"y": [100 * each["mean"] for each in found], "yerr": widths if any(widths) else None}


def _number_axis(axis: Any, values: Sequence[float]) -> None:
    """Few values have a tick each; where they crowd at the small end, the scale is logarithmic."""
    if values and min(values) > 0 and median(values) < 0.4 * (min(values) + max(values)):
        axis.set_xscale("log")
    if len(values) <= 8:
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.minorticks_off()


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
    order = sorted(range(len(images)), key=lambda i: len(sets[i]))
    shown = [order[i] for i in np.linspace(0, len(order) - 1, min(rows * columns, len(order))).astype(int)]
    figure, axes = _pyplot().subplots(rows, columns, figsize=(1.75 * columns, 2.55 * rows), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, i in zip(axes.flat, shown, strict=False):
        axis.imshow(images[i], cmap="gray" if images[i].mode == "L" else None)
        axis.set_title(f"{len(sets[i])} class{'es' * (len(sets[i]) != 1)}", fontsize=8, loc="left", pad=2)
        lines = [("✓ " if j == labels[i] else "   ") + _short(names[j], 26) for j in sets[i][:most]]
        if len(sets[i]) > most:
            lines.append(f"   + {len(sets[i]) - most} more" + (" ✓" if labels[i] in sets[i][most:] else ""))
        if labels[i] not in sets[i]:
            lines.append("✗ " + _short(names[labels[i]], 26))
        axis.text(0, -0.04, "\n".join(lines), transform=axis.transAxes, va="top", fontsize=6.5, linespacing=1.25)
    title = "Predicted sets, from clear to hopeless (✓ the true class, ✗ missed)"
    figure.suptitle(title, fontsize=10, x=0.01, y=0.995, ha="left")
    figure.subplots_adjust(left=0.01, right=0.995, top=0.94, bottom=0.1, wspace=0.3, hspace=0.8)
    _save(figure, path)


def set_size_histogram(counts: dict[str, Sequence[int]], path: str | Path, title: str = "Set sizes on test") -> None:
    """Share of images by set size, one series for each run or group of classes.

    Args:
        counts: For each series, how many images got a set of 0, 1, 2, ... classes.
        path: PNG or SVG to write.
        title: Above the axes.
    """
    width = 0.8 / len(counts)
    with _axis(path, "classes in the set", "share of images", title, height=3.6) as axis:
        for i, (name, series) in enumerate(counts.items()):
            sizes, total = np.arange(len(series)), max(sum(series), 1)
            hatch, grey = MARKS[i % len(MARKS)]
            label = f"{_short(name)} (mean {np.dot(sizes, series) / total:.2f})"
            places = sizes + (i - (len(counts) - 1) / 2) * width
            shares = np.asarray(series) / total
            axis.bar(places, shares, width, label=label, color=grey, edgecolor="black", hatch=hatch)
        axis.xaxis.get_major_locator().set_params(integer=True)


def by_shot(set_sizes: dict[str, list[int]]) -> dict[str, list[int]]:
    """The series for few, medium and many shot classes, where there are such."""
    return {f"{name} shot": set_sizes[name] for name in ("few", "medium", "many") if sum(set_sizes.get(name, ()))}


def accuracy_curve(
    curves: dict[str, dict[float, dict[str, Any]]],
    path: str | Path,
    limits: dict[str, dict[float, float]] | None = None,
) -> None:
    """Average-K accuracy against K, one line for each run or loss, with the interval over seeds where there is one.

    Args:
        curves: For each line, {K: `mean` and `half_width`}, the latter None for one seed.
        path: PNG or SVG to write.
        limits: {name: {K: accuracy}} of lines without intervals, e.g. the best possible.
    """
    with _axis(path, "K, average set size on validation", "average-K accuracy on test (%)", height=4.2) as axis:
        for i, (name, curve) in enumerate(curves.items()):
            found = _percent(list(curve.values()))
            shift = 0.012 * (i - (len(curves) - 1) / 2) if found["yerr"] else 0  # so that intervals do not hide others
            axis.errorbar([k * (1 + shift) for k in curve], **found, capsize=2, label=_short(name), **_look(i))
        for i, (name, limit) in enumerate((limits or {}).items()):
            values = [100 * value for value in limit.values()]
            axis.plot(list(limit), values, color="0.6", linestyle=LINES[-1 - i % 2][0], label=_short(name))
        _number_axis(axis, sorted({k for curve in curves.values() for k in curve}))


def tradeoff_curve(curves: dict[str, Sequence[Sequence[float]]], path: str | Path) -> None:
    """Coverage against mean set size on validation, sets beside top-K, two lines for each run.

    Args:
        curves: For each run, rows as `SetStatistics.curve` gives them: K, lambda_val, size, coverage, top-K accuracy.
        path: PNG or SVG to write.
    """
    with _axis(path, "classes in a set, mean on validation", "sets with the true class (%)") as axis:
        for i, (name, rows) in enumerate(curves.items()):
            sizes, coverages = [row[2] for row in rows], [100 * row[3] for row in rows]
            axis.plot(sizes, coverages, label=f"{_short(name)}, sets", **_look(i))
            whole = [(row[0], 100 * row[4]) for row in rows if float(row[0]).is_integer()]
            look = {**_look(i), "markerfacecolor": "white", "alpha": 0.6}
            axis.plot(*zip(*whole, strict=True), label=f"{_short(name)}, top-K", **look)


def learning_curves(curves: dict[str, Sequence[dict[str, float]]], path: str | Path, title: str = "") -> None:
    """Validation accuracy and validation loss after every epoch, one line for each loss.

    Losses have different scales, so each is divided by its own minimum: a line that rises from 1 shows overfitting.

    Args:
        curves: For each loss, points with `epoch`, `accuracy` and `loss`.
        path: PNG or SVG to write.
        title: Above the axes.
    """
    figure, axes = _pyplot().subplots(1, 2, figsize=(10, 3.8), layout="tight")
    for i, (name, points) in enumerate(curves.items()):
        epochs, least = [point["epoch"] for point in points], min(point["loss"] for point in points)
        axes[0].plot(epochs, [100 * point["accuracy"] for point in points], label=_short(name), **_look(i))
        if least > 0:
            axes[1].plot(epochs, [point["loss"] / least for point in points], **_look(i))
    for axis, label in zip(axes, ("validation average-K accuracy (%)", "validation loss / its minimum"), strict=True):
        axis.set(xlabel="epoch", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def set_size_course(monitor: Any, path: str | Path) -> None:
    """The mean set size of a stream of images with its confidence sequence, and the K that was calibrated.

    Args:
        monitor: What was seen: a `SetSizeMonitor`, e.g. `monitor` of the set pipeline.
        path: PNG or SVG to write.
    """
    if not monitor.history:
        raise ValueError("the monitor has seen no image yet, so there is nothing to draw.")
    number, mean, low, high = np.asarray(monitor.history).T
    title = "drift: the sets left K" if monitor.drifted else "no drift"
    with _axis(path, "images", "classes in the set", title, height=3.6) as axis:
        axis.fill_between(number, low, high, color="0.85", label=f"{100 * monitor.confidence:g}% confidence sequence")
        axis.plot(number, mean, color="0.1", label="mean set size")
        axis.axhline(monitor.k, color="0.3", linestyle="--", label=f"K = {monitor.k:g}, calibrated")
        for sign, label in ((-1, None), (1, "margin: the calibration is an estimate")):
            axis.axhline(monitor.k + sign * monitor.margin, color="0.3", linestyle=":", linewidth=1, label=label)
        axis.set(xscale="log", xlim=(1, max(monitor.num_images, 2)))
        axis.set_ylim(0, min(monitor.max_size, 3 * max(monitor.k, monitor.mean)))  # that of few images has no end
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def export_bars(report: dict[str, Any], path: str | Path) -> None:
    """File size, accuracy and mean set size of exported graphs side by side.

    Args:
        report: What `export_onnx` returns; without measurements the sizes only.
        path: PNG or SVG to write.
    """
    names = list(report["bytes"])
    panels = {"MB": {"": [size / 1e6 for size in report["bytes"].values()]}}
    shown = {"average-K accuracy (%)": ("average_k_accuracy", 100), "mean set size": ("mean_set_size", 1)}
    for title, (metric, factor) in shown.items() if "measured" in report else ():
        panels[title] = {
            f"K = {key}": [factor * report["measured"][name][f"{metric}@{key}"] for name in names]
            for key in report["thresholds"]
        }
    widths = [1, *(2 for _ in list(panels)[1:])]
    options = {"width_ratios": widths, "squeeze": False, "layout": "constrained"}
    figure, axes = _pyplot().subplots(1, len(panels), figsize=(2.2 * sum(widths), 3), **options)
    for axis, (title, groups) in zip(axes[0], panels.items(), strict=True):
        for i, name in enumerate(names):
            places = np.arange(len(groups)) + 0.4 * (i - (len(names) - 1) / 2)
            heights = [values[i] for values in groups.values()]
            bars = axis.bar(places, heights, 0.38, color=["0.3", "0.7"][i], label=name)
            axis.bar_label(bars, fmt="%.2f" if title == "MB" else "%.1f", fontsize=7)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.set_title(title, fontsize=10, loc="left")
        axis.margins(y=0.15)
    shared = axes[0, 0].get_legend_handles_labels()
    figure.legend(*shared, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    _save(figure, path)


def sweep_curve(points: Sequence[dict[str, Any]], path: str | Path, name: str) -> None:
    """Validation accuracy against the values of one hyperparameter, with the interval over seeds.

    Args:
        points: For each value `value`, `mean` and `half_width`, the latter None for one seed.
        path: PNG or SVG to write.
        name: The hyperparameter.
    """
    numbers = all(is_number(point["value"]) for point in points)
    points = sorted(points, key=lambda point: point["value"]) if numbers else points
    values = [point["value"] for point in points]
    with _axis(path, name, "validation average-K accuracy (%)") as axis:
        places = values if numbers else list(range(len(values)))
        axis.errorbar(places, **_percent(points), marker="o", color="0.2", capsize=3)
        if numbers:
            _number_axis(axis, values)
        else:
            axis.set_xticks(places, [_short(str(value), 20) for value in values])


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
    with _axis(path, "images", "" if named else "class", height=max(3.8, 0.2 * len(names)) if named else 5) as axis:
        width = 0.8 / len(counts)
        for i, (split, each) in enumerate(counts.items()):
            hatch, colour = MARKS[i % len(MARKS)]
            drawn = {"height": width, "color": colour, "hatch": hatch, "edgecolor": "0.2", "linewidth": 0.3}
            axis.barh(places + (i - (len(counts) - 1) / 2) * width, each[order], **drawn, label=f"{split} images")
        for bound in (20, 100):
            axis.axvline(bound, color="0.3", linestyle=":", linewidth=1)
        axis.set_xscale("symlog", linthresh=10)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.invert_yaxis()
        if named:
            axis.set_yticks(places, [_short(names[i], 40) for i in order], fontsize=7)
