"""Pictures of set predictions: what the sets look like, how large they are, and what a larger K buys."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from huggingface_hub.utils import tqdm

from .data import load_splits, prepare
from .evaluation import evaluate
from .files import make_folder, new_file, write_text
from .model_card import read_results
from .modeling import AvgKForImageClassification
from .monitor import SetSizeMonitor
from .sets import k_key

SHEET_IMAGES = 480
CURVE_KS = range(1, 21)
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


def model_sheet(model: AvgKForImageClassification, dataset: Dataset, path: str | Path) -> None:
    """The contact sheet of a calibrated model on the first images of one split of `load_splits`."""
    sample = dataset.select(range(min(SHEET_IMAGES, len(dataset))))
    sets = []
    batches = tqdm(range(0, len(sample), 64), desc="contact sheet", unit="batch")
    for batch in (prepare(sample, model.config)[start : start + 64] for start in batches):
        sets += model.predict_sets(torch.stack(batch["pixel_values"]), min_size=1)
    contact_sheet(list(sample["image"]), sets, list(sample["label"]), sample.features["label"].names, path)


def _short(name: str, most: int = 26) -> str:
    """A name as it can be drawn: matplotlib would read `$` as mathematics."""
    name = "".join(c if c.isprintable() else " " for c in name)
    return (name if len(name) <= most else name[: most - 1] + "…").replace("$", r"\$")


def set_size_histogram(counts: dict[str, Sequence[int]], path: str | Path, title: str = "Set sizes on test") -> None:
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
        axis.bar(
            places,
            share,
            width,
            label=f"{_short(name, 60)} (mean {mean:.2f})",
            color=grey,
            edgecolor="black",
            hatch=hatch,
        )
    axis.set(xlabel="classes in the set", ylabel="share of images", title=title)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    figure.tight_layout()
    _save(figure, path)


def accuracy_curve(curves: dict[str, dict[float, float]], path: str | Path) -> None:
    """Average-K accuracy against K, one line for each run.

    Args:
        curves: For each run, {K: accuracy}.
        path: PNG or SVG to write.
    """
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 3.8))
    for i, (name, curve) in enumerate(curves.items()):
        style, marker = LINES[i % len(LINES)]
        grey = str(0.15 * (i % 4))
        axis.plot(list(curve), [100 * v for v in curve.values()], linestyle=style, marker=marker, color=grey,
                  markersize=4, label=_short(name, 60))  # fmt: skip
    axis.set(xlabel="K, average set size on validation", ylabel="average-K accuracy on test (%)")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    _save(figure, path)


def tradeoff_curve(curves: dict[str, Sequence[Sequence[float]]], path: str | Path) -> None:
    """Coverage against mean set size on validation, sets beside top-K, two lines for each run.

    Args:
        curves: For each run, rows as `SetStatistics.curve` gives them: K, lambda_val, size, coverage, top-K accuracy.
        path: PNG or SVG to write.
    """
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 3.8))
    for i, (name, rows) in enumerate(curves.items()):
        style, marker = LINES[i % len(LINES)]
        look = {"linestyle": style, "markersize": 4, "color": str(0.15 * (i % 4))}
        axis.plot([row[2] for row in rows], [100 * row[3] for row in rows], marker=marker,
                  label=f"{_short(name, 60)}, sets", **look)  # fmt: skip
        whole = [row for row in rows if float(row[0]).is_integer()]
        axis.plot([row[0] for row in whole], [100 * row[4] for row in whole], marker=marker, markerfacecolor="white",
                  label=f"{_short(name, 60)}, top-K", alpha=0.6, **look)  # fmt: skip
    axis.set(xlabel="classes in a set, mean on validation", ylabel="sets with the true class (%)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    _save(figure, path)


def accuracy_intervals(
    curves: dict[str, Sequence[dict[str, Any]]], path: str | Path, limits: dict[str, dict[float, float]] | None = None
) -> None:
    """Average-K accuracy against K with the interval over seeds, one line for each loss.

    Args:
        curves: For each loss, points with `k`, `mean` and `half_width`, the latter None for one seed.
        path: PNG or SVG to write.
        limits: {name: {K: accuracy}} of lines without intervals, e.g. the best possible.
    """
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.2))
    ks = sorted({point["k"] for points in curves.values() for point in points})
    for i, (name, points) in enumerate(curves.items()):
        style, marker = LINES[i % len(LINES)]
        shift = 1 + 0.012 * (i - (len(curves) - 1) / 2)  # so that intervals do not hide each other
        axis.errorbar(
            [point["k"] * shift for point in points],
            [100 * point["mean"] for point in points],
            [100 * (point["half_width"] or 0) for point in points],
            linestyle=style, marker=marker, color=str(0.15 * (i % 4)), markersize=4, capsize=2, label=_short(name, 60),
        )  # fmt: skip
    for i, (name, limit) in enumerate((limits or {}).items()):
        axis.plot(list(limit), [100 * v for v in limit.values()], color="0.6", linestyle=LINES[-1 - i % 2][0],
                  label=_short(name, 60))  # fmt: skip
    axis.set_xscale("log")
    axis.set_xticks(ks, [f"{k:g}" for k in ks])
    axis.minorticks_off()
    axis.set(xlabel="K, average set size on validation", ylabel="average-K accuracy on test (%)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    _save(figure, path)


def learning_curves(curves: dict[str, Sequence[dict[str, float]]], path: str | Path, title: str = "") -> None:
    """Validation accuracy and validation loss after every epoch, one line for each loss.

    Losses have different scales, so each is divided by its own minimum: a line that rises from 1 shows overfitting.

    Args:
        curves: For each loss, points with `epoch`, `accuracy` and `loss`.
        path: PNG or SVG to write.
        title: Above the axes.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    for i, (name, points) in enumerate(curves.items()):
        style, marker = LINES[i % len(LINES)]
        look = {"linestyle": style, "marker": marker, "color": str(0.15 * (i % 4)), "markersize": 3}
        epochs = [point["epoch"] for point in points]
        least = min(point["loss"] for point in points)
        axes[0].plot(epochs, [100 * point["accuracy"] for point in points], label=_short(name, 60), **look)
        if least > 0:
            axes[1].plot(epochs, [point["loss"] / least for point in points], label=_short(name, 60), **look)
    axes[0].set(xlabel="epoch", ylabel="validation average-K accuracy (%)")
    axes[1].set(xlabel="epoch", ylabel="validation loss / its minimum")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    _save(figure, path)


def set_size_course(monitor: SetSizeMonitor, path: str | Path) -> None:
    """The mean set size of a stream of images with its confidence sequence, and the K that was calibrated.

    Args:
        monitor: What was seen, e.g. `monitor` of the set pipeline.
        path: PNG or SVG to write.
    """
    if not monitor.history:
        raise ValueError("the monitor has seen no image yet, so there is nothing to draw.")
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 3.6))
    number, mean, low, high = np.asarray(monitor.history).T
    axis.fill_between(number, low, high, color="0.85", label=f"{100 * monitor.confidence:g}% confidence sequence")
    axis.plot(number, mean, color="0.1", label="mean set size")
    k = k_key(monitor.k)
    axis.axhline(monitor.k, color="0.3", linestyle="--", label=f"K = {k}, calibrated")
    for sign in (-1, 1):
        axis.axhline(monitor.k + sign * monitor.margin, color="0.3", linestyle=":", linewidth=1,
                     label="margin: the calibration is an estimate" if sign > 0 else None)  # fmt: skip
    axis.set(xlabel="images", ylabel="classes in the set", xscale="log", xlim=(1, max(monitor.num_images, 2)))
    axis.set_ylim(0, min(monitor.max_size, 3 * max(monitor.k, monitor.mean)))  # the interval of few images has no end
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_title("drift: the sets left K" if monitor.drifted else "no drift", fontsize=10, loc="left")
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    _save(figure, path)


def export_bars(report: dict[str, Any], path: str | Path) -> None:
    """File size, accuracy and mean set size of exported graphs side by side.

    Args:
        report: What `export_onnx` returns; without measurements the sizes only.
        path: PNG or SVG to write.
    """
    plt = _pyplot()
    names = list(report["bytes"])
    panels = [("MB", {"": [size / 1e6 for size in report["bytes"].values()]})]
    if "measured" in report:
        for title, metric, factor in (
            ("average-K accuracy (%)", "average_k_accuracy", 100),
            ("mean set size", "mean_set_size", 1),
        ):
            of_k = {
                f"K = {key}": [factor * report["measured"][name][f"{metric}@{key}"] for name in names]
                for key in report["thresholds"]
            }
            panels.append((title, of_k))
    widths = [1, *(2 for _ in panels[1:])]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(2.2 * sum(widths), 3), width_ratios=widths, squeeze=False, layout="constrained"
    )
    for axis, (title, groups) in zip(axes[0], panels, strict=True):
        for i, name in enumerate(names):
            places = np.arange(len(groups)) + 0.4 * (i - (len(names) - 1) / 2)
            bars = axis.bar(
                places, [values[i] for values in groups.values()], 0.38, color=["0.3", "0.7"][i], label=name
            )
            axis.bar_label(bars, fmt="%.2f" if title == "MB" else "%.1f", fontsize=7)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.set_title(title, fontsize=10, loc="left")
        axis.margins(y=0.15)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8
    )
    _save(figure, path)


def sweep_curve(points: Sequence[dict[str, Any]], name: str, path: str | Path) -> None:
    """Validation accuracy against the values of one hyperparameter, with the interval over seeds.

    Args:
        points: For each value `value`, `mean` and `half_width`, the latter None for one seed.
        name: The hyperparameter.
        path: PNG or SVG to write.
    """
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(5.5, 3.5))
    numbers = all(isinstance(p["value"], (int, float)) and not isinstance(p["value"], bool) for p in points)
    points = sorted(points, key=lambda point: point["value"]) if numbers else points
    values = [point["value"] for point in points]
    places = values if numbers else range(len(values))
    axis.errorbar(
        places,
        [100 * point["mean"] for point in points],
        [100 * (point["half_width"] or 0) for point in points],
        marker="o", color="0.2", capsize=3,
    )  # fmt: skip
    if numbers and min(values) > 0 and max(values) >= 8 * min(values):
        axis.set_xscale("log")
    if not numbers or len(values) <= 8:
        axis.set_xticks(list(places), [_short(str(value), 20) for value in values])
        axis.minorticks_off()
    axis.set(xlabel=name, ylabel="validation average-K accuracy (%)")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    _save(figure, path)


def plot_runs(
    runs: Sequence[str | Path],
    out: str | Path,
    formats: Sequence[str] = ("png", "svg"),
    allow_outside: bool = False,
) -> list[Path]:
    """All pictures of one or more runs of `avgk train`, from their models and their data.

    The trade-off is drawn as the calibration recorded it. Thresholds for K = 1 to 20 are computed on validation in
    memory; the runs themselves are not changed. The numbers behind the accuracy curve are written beside it.

    Args:
        runs: Folders of runs.
        out: Folder for the pictures.
        formats: Endings of the files to write.
        allow_outside: As in `load_splits`; what a run recorded of it does not count.

    Returns:
        The files that were written.
    """
    out = make_folder(out)
    names = [Path(run).name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run).strip("/").replace("/", "-") for run in runs]
    loaded: dict[str, Any] = {}
    sizes, curves, tradeoffs, files = {}, {}, {}, []

    def draw(name: str, picture: Any, *arguments: Any) -> None:
        for ending in formats:
            files.append(out / f"{name}.{ending}")
            picture(*arguments, files[-1])

    for name, run in zip(names, runs, strict=True):
        results = _read_results(Path(run))
        data = results["data"]
        key = json.dumps(data, sort_keys=True)
        if key not in loaded:
            loaded[key] = load_splits(
                data["dataset"],
                data["dataset_config"],
                data["image_column"],
                data["label_column"],
                data["glyphs_seed"],
                data.get("validation_per_class"),
                data.get("split_seed", 0),
                allow_outside=allow_outside,
            )
        splits = loaded[key]
        model = AvgKForImageClassification.from_pretrained(run)
        tradeoffs[name] = (model.config.calibration or {}).get("curve")  # before the curve against K calibrates anew
        draw(f"contact_sheet_{name}", model_sheet, model, splits[data["test_split"]])
        draw(f"set_sizes_by_shot_{name}", set_size_histogram, _by_shot(results["set_sizes"]))
        sizes[name] = results["set_sizes"]["all"]
        curves[name] = _curve(model, splits[data["validation_split"]], splits[data["test_split"]])
    draw("set_sizes", set_size_histogram, sizes)
    draw("accuracy_against_k", accuracy_curve, curves)
    tradeoffs = {name: curve for name, curve in tradeoffs.items() if curve}
    if tradeoffs:  # earlier versions did not record it
        draw("tradeoff", tradeoff_curve, tradeoffs)
    files.append(out / "accuracy_against_k.json")
    write_text(files[-1], json.dumps(curves, indent=2) + "\n")
    return files


def _read_results(run: Path) -> dict[str, Any]:
    if not (run / "results.json").is_file():
        raise FileNotFoundError(f"{run} holds no results.json; name the folder of a finished `avgk train`.")
    results = read_results(run, "data")
    if "set_sizes" not in results:
        raise ValueError(f"{run} was not evaluated on a test split, so there are no set sizes to show.")
    return results


def _by_shot(set_sizes: dict[str, list[int]]) -> dict[str, list[int]]:
    return {f"{name} shot": set_sizes[name] for name in ("few", "medium", "many") if sum(set_sizes[name])}


def _curve(model: AvgKForImageClassification, validation: Dataset, test: Dataset) -> dict[float, float]:
    ks = [k for k in CURVE_KS if k < model.config.num_labels]
    evaluate(model, validation, ks, calibrate=True)
    metrics = evaluate(model, test, ks)
    own = model.config.k
    return {k: metrics["average_k_accuracy" + ("" if k == own else f"@{k_key(k)}")] for k in ks}


def _save(figure: Any, path: str | Path) -> None:
    path = Path(path)
    with new_file(path if path.suffix else path.with_name(f"{path.name}.png")) as new:
        figure.savefig(new, dpi=130)
    _pyplot().close(figure)
