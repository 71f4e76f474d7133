"""`avgk demo`: train AVG-K and cross-entropy on glyphs from their recipes, compare them, and show the sets."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..files import make_folder, write_text

HELP = "train CE and AVG-K on generated glyphs and compare them (3 minutes)"
OBJECTIVES = {"ce": "CE", "avgk": "AVG-K"}
BALANCE = 0.5
SENTENCE = (
    "After these few epochs, with nothing tuned, {ahead} is ahead; what longer trainings find is in docs/study.md.\n"
    "The second row is the same CE model asked with balance 0.5, no further training: rare classes count for more."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/demo", help="folder for models, pictures and table (%(default)s)")


def run(args: argparse.Namespace) -> None:
    demo(args.out)


def find_recipe(name: str) -> Path:
    """A recipe of this package, in the installed wheel or in the checkout."""
    package = Path(__file__).parent.parent
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"there is no recipe {name!r} beside the package; reinstall avgk_hf.")


def table(results: dict[str, dict[str, Any]]) -> str:
    """Test results of several runs as a Markdown table."""
    from ..study.columns import as_table, columns_of

    columns, k = columns_of("demo"), next(iter(results.values()))["k"]
    rows = [[name, *(c.cell(result["test"].get(c.metric)) for c in columns)] for name, result in results.items()]
    return as_table(["", *(column.heading(k) for column in columns)], rows)


def rows_of(objective: str, folder: Path, overrides: tuple[str, ...], splits: Any = None) -> tuple[dict, Any]:
    """Train from a recipe; the rows of the table that this makes, with their results, and the data.

    CE makes two rows: the same model answers once more with a balance, without further training.

    Args:
        objective: Of `OBJECTIVES`.
        folder: Where the model goes, in a folder of its own.
        overrides: `--field value` pairs for the recipe.
        splits: The data, where it is loaded already.
    """
    from .. import train
    from ..evaluation import evaluate
    from ..modeling import AvgKForImageClassification

    recipe, name = str(find_recipe(f"glyphs/{objective}.yaml")), OBJECTIVES[objective]
    blocks = train.parse_recipe([recipe, "--output_dir", str(folder / objective), *overrides])
    splits = splits or train.load_all(*blocks[1:])
    print(f"\n== {name}: {recipe}")
    rows = {name: train.run(*blocks, splits)}
    if objective == "ce":
        model = AvgKForImageClassification.from_pretrained(folder / objective)
        again = evaluate(model, splits["test"], balance=BALANCE, batch_size=256)
        rows[f"{name}, balance {BALANCE:g}"] = {"k": rows[name]["k"], "test": again}
    return rows, splits


def demo(folder: str | Path, overrides: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Run the demo and write everything into `folder`.

    Args:
        folder: Where models, pictures and the table go.
        overrides: `--field value` pairs for both recipes, e.g. `("--num_train_epochs", "1")`.

    Returns:
        The results of both runs, and of CE with a balance, by the name of their row.
    """
    from ..confusions import Listed
    from ..evaluation import evaluate
    from ..modeling import AvgKForImageClassification
    from ..sets import k_key
    from ..study.plots import set_size_histogram
    from .plot import accuracy_of, draw_sheet

    folder, splits, results = make_folder(folder), None, {}
    for objective in OBJECTIVES:
        rows, splits = rows_of(objective, folder, overrides, splits)
        results |= rows
    model = AvgKForImageClassification.from_pretrained(folder / "avgk")
    sheet, histogram = folder / "contact_sheet.png", folder / "set_sizes.png"
    listed = Listed(model.config)
    evaluate(model, splits["test"], batch_size=256, listed=[listed])
    draw_sheet(listed, f"AVG-K, {accuracy_of(listed)}", sheet)
    sizes = {name: results[name]["set_sizes"]["all"] for name in OBJECTIVES.values()}
    set_size_histogram(sizes, histogram, f"Set sizes on test, K = {k_key(model.config.k)}")
    text = table(results)
    write_text(folder / "table.md", text + "\n")
    write_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    print(f"\n{text}\n\n(accuracies in percent, on test; shot columns are means over classes)\n")
    ahead = max(OBJECTIVES.values(), key=lambda name: results[name]["test"]["average_k_accuracy"])
    print(SENTENCE.format(ahead=ahead))
    print(f"models and cards: {folder / 'ce'}, {folder / 'avgk'}")
    for what, path in (("contact sheet:", sheet), ("set sizes:", histogram), ("table:", folder / "table.md")):
        print(f"{what:18}{path}")
    print(f"\nNext: avgk app {folder / 'ce'} (the page, with examples), or avgk evaluate {folder / 'ce'} glyphs")
    return results
