"""YAML that holds plain values and nothing else: recipes, and what a dataset's README says of itself."""

import shlex
from pathlib import Path
from typing import Any

import yaml

from .checks import near_folder, reason_of

MOST_CHARACTERS = 1_000_000
TAG = "tag:yaml.org,2002:"
PLAIN = {None, *(TAG + name for name in ("null", "bool", "int", "float", "str", "seq", "map"))}  # None refuses others


class _Loader(yaml.SafeLoader):
    """Text, numbers, lists and mappings; dates stay text.

    Refused are tags of objects, aliases, which let a few lines stand for more values than any memory holds, and a key
    that occurs twice: which of the two was meant cannot be known.
    """

    yaml_constructors = {tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag in PLAIN}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            problem = f"the alias *{event.anchor} is not followed; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != f"{TAG}merge"):
            if key.value in seen:
                problem = f"the key {key.value!r} occurs twice; keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_date(self, node: yaml.ScalarNode) -> str:
        self.construct_yaml_timestamp(node)  # refuses one that does not exist
        return node.value


_Loader.add_constructor(f"{TAG}timestamp", _Loader.construct_date)


def load_yaml(text: str) -> Any:
    """The values that a text holds.

    Example:
        >>> load_yaml("{k: 3, calibrate_k: [1, 2]}")
        {'k': 3, 'calibrate_k': [1, 2]}
        >>> load_yaml("[&x [1], *x]")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: the alias *x is not followed; write the value out in "<unicode string>", line 1, column 10: ...
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, and {MOST_CHARACTERS} are the most that is read")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date or number
        raise ValueError(reason_of(error)) from None


def read_recipe(path: Path) -> dict[str, Any]:
    """The `key: value` pairs of a recipe file."""
    if path.is_dir():
        kind, remedy = "folder of images", f"`avgk init {shlex.quote(str(path))} --out recipe.yaml` writes one"
        if (path / "config.json").exists():
            kind, remedy = "model", f"name the YAML file; `avgk info {shlex.quote(str(path))}` says what the model is"
            remedy += ", and `avgk report` and `avgk plot` compare finished runs"
        raise IsADirectoryError(f"{path} is a {kind}, no recipe: {remedy}.")
    if not path.is_file():
        ended = f"{path}.yaml"
        near = ended if Path(ended).is_file() else near_folder(str(path), file=True)
        hint = f"did you mean {near!r}?" if near else "name a YAML file."
        raise FileNotFoundError(f"there is no recipe {str(path)!r}; {hint}")
    try:
        recipe = load_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of a file that is not UTF-8
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(recipe, dict):
        found = "nothing" if recipe is None else type(recipe).__name__
        raise ValueError(f"{path} must hold `key: value` pairs, but holds {found}. See recipes/glyphs/avgk.yaml.")
    return recipe
