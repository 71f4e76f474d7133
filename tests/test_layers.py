"""Imports go one way, and the public names are those of the README."""

import ast
from pathlib import Path

import avgk_hf

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "avgk_hf"
LAYERS = [
    {"checks", "files", "guard", "images", "plain_yaml", "processes", "shell"},
    {"sets"},
    {"conformal", "losses", "monitor", "densenet"},
    {"backbones"},
    {"configuration", "set_statistics", "pipeline"},
    {"metrics"},
    {"data", "modeling"},
    {"auto", "training_args", "model_card", "hub", "runs"},
    {"classifiers", "trainer", "report"},
    {"evaluation"},
    {"app", "export", "plots"},
    {"space", "train"},
    {"comparison", "demo", "sweep"},
    {"verdict"},
    {"compare"},
    {"commands"},
    {"cli"},
]
REMOTE = {
    "backbones", "checks", "configuration", "conformal", "densenet", "files", "images", "modeling", "monitor",
    "pipeline", "sets",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, anywhere in it."""
    inside = list(path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) + 1 - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {(*base, *name.split("."))[0] for name in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("avgk_hf."):
            found.add(node.module.split(".")[1])
    return found - {"__version__"}


def test_imports_go_down():
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files} == set(level)
    for path in files:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for other in imports(path) - {own, "AvgKForImageClassification"}:
            allowed = level[other] < level[own] or (own, other) == ("trainer", "training_args")
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
