"""`avgk demo`: train AVG-K and cross-entropy on glyphs from their recipes, compare them, and show the sets."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..files import make_folder, write_text

HELP = "train CE and AVG-K on generated glyphs and compare them (3 minutes)"
OBJECTIVES = {"ce": "CE", "avgk": "AVG-K"}


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


def demo(folder: str | Path, overrides: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Run the demo and write everything into `folder`.

    Args:
        folder: Where models, pictures and the table go.
        overrides: `--field value` pairs for both recipes, e.g. `("--num_train_epochs", "1")`.

    Returns:
        The results of both runs, by name.
    """
    from .. import train
    from ..modeling import AvgKForImageClassification
    from ..sets import k_key
    from ..study.plots import contact_sheet, set_size_histogram
    from .plot import accuracy_of, sheet_of

    folder, splits, results = make_folder(folder), None, {}
    for objective, name in OBJECTIVES.items():
        recipe = str(find_recipe(f"glyphs/{objective}.yaml"))
        blocks = train.parse_recipe([recipe, "--output_dir", str(folder / objective), *overrides])
        splits = splits or train.load_all(*blocks[1:])
        print(f"\n== {name}: {recipe}")
        results[name] = train.run(*blocks, splits)
    model = AvgKForImageClassification.from_pretrained(folder / "avgk")
    sheet, histogram = folder / "contact_sheet.png", folder / "set_sizes.png"
    *shown, scores = sheet_of(model, splits["test"])
    title = f"AVG-K, {accuracy_of(results['AVG-K'])}. Predicted sets, from clear to hopeless"
    contact_sheet(*shown, sheet, scores, title)
    sizes = {name: result["set_sizes"]["all"] for name, result in results.items()}
    set_size_histogram(sizes, histogram, f"Set sizes on test, K = {k_key(model.config.k)}")
    text = table(results)
    write_text(folder / "table.md", text + "\n")
    write_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    print(f"\n{text}\n\n(accuracies in percent, on test; shot columns are means over classes)\n")
    print(f"models and cards: {folder / 'ce'}, {folder / 'avgk'}")
    for what, path in (("contact sheet:", sheet), ("set sizes:", histogram), ("table:", folder / "table.md")):
        print(f"{what:18}{path}")
    print(f"\nNext: avgk predict {folder / 'avgk'} IMAGE.png")
    return results
