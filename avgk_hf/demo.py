"""The demo: train AVG-K and cross-entropy on glyphs from their recipes, compare them, and show the sets."""

import json
from pathlib import Path
from typing import Any

from .data import load_splits
from .files import make_folder, write_text
from .modeling import AvgKForImageClassification
from .plots import model_sheet, set_size_histogram
from .recipes import parse_recipe
from .sets import k_key
from .train import run

OBJECTIVES = {"ce": "CE", "avgk": "AVG-K"}
# what the table shows, and what it is multiplied by
COLUMNS = {
    "average_k_accuracy": 100,
    "mean_set_size": 1,
    "top1_accuracy": 100,
    "few_shot_accuracy": 100,
    "medium_shot_accuracy": 100,
    "many_shot_accuracy": 100,
}


def find_recipe(name: str) -> Path:
    """A recipe of this package, in the installed wheel or in the checkout."""
    here = Path(__file__).parent
    for folder in (here / "recipes", here.parent / "recipes"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"there is no recipe {name!r} beside the package; reinstall avgk_hf.")


def column_names(k: float) -> list[str]:
    """The headings of `COLUMNS`."""
    return [f"average-{k_key(k)} accuracy", "mean set size", "top-1", "few shot", "medium shot", "many shot"]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Test results of several runs as a Markdown table."""
    columns = column_names(next(iter(results.values()))["k"])
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, result in results.items():
        values = [(result["test"].get(metric), scale) for metric, scale in COLUMNS.items()]
        cells = ["–" if value is None else f"{scale * value:.2f}" for value, scale in values]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def demo(folder: str | Path = "runs/demo", overrides: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the demo and write everything into `folder`.

    Args:
        folder: Where models, pictures and the table go.
        overrides: `--field value` pairs for both recipes, e.g. `["--num_train_epochs", "1"]`.

    Returns:
        The results of both runs, by name.
    """
    folder = make_folder(folder)
    splits, results = None, {}
    for objective, name in OBJECTIVES.items():
        recipe = str(find_recipe(f"glyphs/{objective}.yaml"))
        model_args, data_args, args = parse_recipe(
            [recipe, "--output_dir", str(folder / objective), *(overrides or [])]
        )
        splits = splits or load_splits(data_args.dataset, seed=data_args.glyphs_seed)
        print(f"\n== {name}: {recipe}")
        results[name] = run(model_args, data_args, args, splits)

    model = AvgKForImageClassification.from_pretrained(folder / "avgk")
    sheet, histogram = folder / "contact_sheet.png", folder / "set_sizes.png"
    model_sheet(model, splits["test"], sheet)
    set_size_histogram(
        {name: result["set_sizes"]["all"] for name, result in results.items()},
        histogram,
        title=f"Set sizes on test, K = {k_key(model.config.k)}",
    )
    text = table(results)
    write_text(folder / "table.md", text + "\n")
    write_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    print(f"\n{text}\n\n(accuracies in percent, on test; shot columns are means over classes)\n")
    for what, path in {
        "models and cards": f"{folder / 'ce'}, {folder / 'avgk'}",
        "contact sheet": sheet,
        "set sizes": histogram,
        "table": folder / "table.md",
    }.items():
        print(f"{what + ':':18}{path}")
    print(f"\nNext: avgk predict {folder / 'avgk'} IMAGE.png")
    return results
