"""Imports go one way, and the public names are those of the README."""

import ast
import re
from pathlib import Path

import avgk_hf

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "avgk_hf"
STUDY = PACKAGE / "study" / "__init__.py"  # imports nothing
LAYERS = [
    {"checks", "files", "processes", "shell"},
    {"images", "plain_yaml", "sets"},
    {"backbones", "conformal", "losses"},
    {"questions"},
    {"calibration", "statistics"},
    {"configuration", "data", "metrics", "monitor"},
    {"pipeline"},
    {"modeling"},
    {"auto", "classifiers", "hub", "model_card", "training_args"},
    {"checkpoints", "evaluation"},
    {"app", "export", "trainer"},
    {"recipes"},
    {"train", "study"},
    {"commands"},
    {"cli"},
]


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, anywhere in it."""
    inside = list(path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) + 1 - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {module((*base, *name.split("."))) for name in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("avgk_hf."):
            found.add(node.module.split(".")[1])
    return found - {"__version__"}


def test_imports_go_down():
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    files = [path for path in PACKAGE.rglob("*.py") if path not in (PACKAGE / "__init__.py", STUDY)]
    assert {module(path.relative_to(PACKAGE).parts) for path in files} == set(level)
    for path in files:
        own = module(path.relative_to(PACKAGE).parts)
        for other in imports(path) - {own, "AvgKForImageClassification"}:
            allowed = level[other] < level[own] or (own, other) in {
                ("trainer", "checkpoints"),
                ("modeling", "losses"),
                ("configuration", "losses"),  # what a loss states about itself, where the package is installed
            }
            assert allowed, f"{path.name} ({own}) imports {other}"


def remote_files() -> set[str]:
    """What the model needs and therefore carries, by way of its imports."""
    found, left = set(), {"modeling"}
    while left:
        found |= left
        left = {other for name in left for other in imports(PACKAGE / f"{name}.py")} - found - {"losses"}
    return found


def test_inference_files_stay_flat():
    """What travels with a saved model imports only other files that do; losses are asked for where they are there."""
    for name in remote_files():
        source = (PACKAGE / f"{name}.py").read_text()
        assert not re.search(r"^(import avgk_hf|from avgk_hf|from \. import|from \.\w+\.)", source, re.M), name


def test_public_names_exist_and_are_documented():
    readme = (ROOT / "README.md").read_text()
    for name in avgk_hf.__all__:
        assert getattr(avgk_hf, name) is not None
        assert name == "__version__" or f"`{name}" in readme, f"{name} is not in the README"
