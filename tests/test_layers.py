"""Imports go one way, files and functions stay small, and the public names are those of docs/python.md."""

import ast
import re
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import avgk_hf

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "avgk_hf"
# a file may import those of the layers before its own, and in its own those that are named before it
LAYERS = [
    "checks files shell rows images plain_yaml scores sets records processes",
    "conformal losses",
    "questions calibration details scope statistics collecting",
    "backbones weights configuration data",
    "monitor pipeline modeling auto",
    "classifiers confusions evaluation features metrics prediction cluster",
    "averaging training_args hub results model_card progress checkpoints optimizers predictions trainer export"
    " endpoint app",
    "recipes study.columns study.seeds study.drawing study.plots study.class_plots train"
    " study.spec study.training study.balances study.variants study.report study.runner study.sweep",
    "commands cli predict",
]
LINES, FILE, FUNCTION = 20_165, 400, 60  # the first is to fall


def room(parts: tuple[str, ...]) -> str:
    """What a file is called in LAYERS: its folder, but in the study each by its own name."""
    return ".".join(parts[:2] if parts[0] == "study" else parts[:1]).removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, anywhere in it."""
    inside = list(path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) + 1 - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {room((*base, *name.split("."))) for name in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("avgk_hf."):
            found.add(room(tuple(node.module.split(".")[1:])))
    return found - {"__version__"}


def sources() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent.name in ("losses",)]


def test_imports_go_down():
    order = {name: i for i, name in enumerate(" ".join(LAYERS).split())}
    assert len(LAYERS) <= 9
    assert {room(path.relative_to(PACKAGE).parts) for path in sources()} == set(order)
    for path in sources():
        own = room(path.relative_to(PACKAGE).parts)
        for other in imports(path) - {own}:
            # what a loss states about itself, where the package is installed
            allowed = order[other] < order[own] or (own, other) in {
                ("modeling", "losses"),
                ("configuration", "losses"),
            }
            assert allowed, f"{path.relative_to(PACKAGE)} imports {other}"


def test_sizes():
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert sum(lengths.values()) <= LINES
    for path, length in lengths.items():
        assert length <= FILE, f"{path.relative_to(PACKAGE)} has {length} lines"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                number = node.end_lineno - node.lineno + 1
                assert number <= FUNCTION, f"{path.relative_to(PACKAGE)}: {node.name} has {number} lines"


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
    page = (ROOT / "docs" / "python.md").read_text()
    for name in avgk_hf.__all__:
        assert getattr(avgk_hf, name) is not None
        assert name == "__version__" or f"`{name}" in page, f"{name} is not in docs/python.md"


def needed(extras: str = "") -> set[str]:
    """The packages that installing this one brings, by their names in lower case, with those of some extras."""
    found, left = set(), [f"avgk_hf[{extras}]"]
    while left:
        wanted = Requirement(left.pop())
        name = canonicalize_name(wanted.name)
        if (name, *sorted(wanted.extras)) in found:
            continue
        found.add((name, *sorted(wanted.extras)))
        try:
            asked = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        for text in asked:
            marker = Requirement(text).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*wanted.extras, "")):
                left.append(text)
    return {name for name, *_ in found}


def test_what_is_imported_is_installed():
    """Without the extras by all that has none of them; whatever else the developers' environment has is of no use."""
    core, all_of_them = needed(), needed("app,demo,onnx,ray,sweep")
    packages = packages_distributions()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        at_once = {id(node) for node in tree.body}
        of_page = path.parent.name == "app" or path.name == "app.py"
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "avgk_hf"}:
                owners = set(map(canonicalize_name, packages[name]))
                known = core if id(node) in at_once and not of_page and "study" not in path.parts else all_of_them
                assert owners & known, f"{path.relative_to(ROOT)} imports {name}, which installing it does not bring"
