"""Imports go one way, and the public names are those of the README."""

import ast
from collections.abc import Sequence
from pathlib import Path

import avgk_hf

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "avgk_hf"
STUDY = PACKAGE / "study" / "__init__.py"  # imports nothing
LAYERS = [
    {"checks", "files", "guard", "images", "plain_yaml", "shell"},
    {"sets"},
    {"conformal", "monitor", "densenet"},
    {"backbones"},
    {"configuration", "set_statistics", "pipeline"},
    {"metrics", "processes"},
    {"data", "modeling", "losses"},
    {"auto", "training_args", "model_card", "hub", "runs"},
    {"classifiers", "trainer", "study.columns", "study.plots"},
    {"evaluation", "study.seeds"},
    {"app", "export"},
    {"space", "train"},
    {"study.spec", "study.training"},
    {"study.report", "study.sweep"},
    {"study.runner"},
    {"commands"},
    {"cli"},
]
REMOTE = {
    "backbones", "checks", "configuration", "conformal", "densenet", "files", "images", "modeling", "monitor",
    "pipeline", "sets",
}  # fmt: skip


def module(parts: Sequence[str]) -> str:
    """The name in `LAYERS`; a folder counts as one, but for `study`, whose lower files training uses."""
    return ".".join(parts[: 2 if parts[0] == "study" else 1]).removesuffix(".py")


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
                ("trainer", "training_args"),
                ("modeling", "losses"),
                ("configuration", "losses"),  # what a loss states about itself, where the package is installed
            }
            assert allowed, f"{path.name} ({own}) imports {other}"


def test_inference_files_stay_flat():
    """Only these files travel with a saved model."""
    for name in REMOTE:
        for node in (PACKAGE / f"{name}.py").read_text().splitlines():
            if node.startswith(("from .", "import avgk_hf", "from avgk_hf")):
                assert node.split()[1].lstrip(".") in REMOTE


def test_public_names_exist_and_are_documented():
    readme = (ROOT / "README.md").read_text()
    for name in avgk_hf.__all__:
        assert getattr(avgk_hf, name) is not None
        assert name == "__version__" or f"`{name}" in readme, f"{name} is not in the README"
