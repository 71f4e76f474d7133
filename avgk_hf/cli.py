"""The `avgk` command: finds the file of the command under `commands/` and runs it."""

import argparse
import importlib
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from . import __version__
from .files import open_log
from .shell import guarded, logged, number_remedy, printable

COMMANDS = (
    "demo", "check", "init", "train", "calibrate", "evaluate", "predict", "info", "sweep", "compare",
    "report", "plot", "export", "push", "card", "app", "glyphs",
)  # fmt: skip


def _number(text: str, kind: type = float, word: str = "number") -> float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {word}{number_remedy(text)}") from None


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", float, _number)
        self.register("type", int, partial(_number, kind=int, word="whole number"))

    def error(self, message: str, word: str = "", known: Iterable[str] = ()) -> NoReturn:
        """End with one line, and what may be meant by a word that is not known."""
        near = get_close_matches(word.partition("=")[0].lower(), known, 1)
        near = f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {printable(message)}{near} (`{self.prog} --help` lists the options)\n")


def build_parser(*names: str) -> argparse.ArgumentParser:
    """The options before a command, and those of the named commands, by default of all."""
    parser = _Parser(
        prog="avgk",
        description="Image classification with as many classes as the image needs, K on average.",
        epilog="`avgk COMMAND --help` explains a command. With AVGK_DEBUG=1 errors come with their traceback.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"avgk_hf {__version__}")
    parser.add_argument("--log", metavar="FILE", help="append to a file what is printed; before the command")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names or COMMANDS:
        module = find(name)
        command = commands.add_parser(name, help=module.HELP.replace("%", "%%"), description=module.HELP)
        module.arguments(command)
    return parser


def _who_has(option: str) -> list[str]:
    """The commands with an option."""
    parsers = next(each for each in build_parser()._actions if isinstance(each.choices, dict)).choices
    return [f"`avgk {name}`" for name, parser in parsers.items() if option in parser._option_string_actions]


def find(name: str) -> ModuleType:
    """The file of a command."""
    return importlib.import_module(f"avgk_hf.commands.{name}")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `avgk`; returns the exit code."""
    before = _Parser(prog="avgk", add_help=False, allow_abbrev=False)  # what precedes the command
    before.add_argument("--log", metavar="FILE")
    before.add_argument("command", nargs=argparse.REMAINDER)
    found, unknown = before.parse_known_args(arguments)
    words = unknown + found.command or ["--help"]
    parser = build_parser(*(name for name in words[:1] if name in COMMANDS))
    known = (*COMMANDS, *parser._option_string_actions)
    if words[0] not in known:
        parser.error(f"there is no command or option {words[0]!r}", words[0], known)
    args, unknown = parser.parse_known_args(words)
    if unknown and "overrides" not in args:
        own = next(action for action in parser._actions if isinstance(action.choices, dict)).choices[args.command]
        text = f"unrecognized arguments: {' '.join(unknown)}"
        before = words[words.index(unknown[0]) - 2]
        if re.fullmatch(r"[\d.]+", unknown[0]) and before in own._option_string_actions:
            own.error(f"{before} takes one number here: leave out {' '.join(unknown)}")
        if unknown[0].partition("=")[0] == "--log":
            own.error(f"--log stands before the command: `avgk --log FILE {args.command} ...`")
        places = [action.dest for action in own._actions if not action.option_strings]
        if unknown[0].removeprefix("--") in places and unknown[0].startswith("--"):
            own.error(f"{unknown[0]} is given by its place: `avgk {args.command} {' '.join(places).upper()}`")
        if others := _who_has(unknown[0].partition("=")[0]):
            own.error(f"{text}; {unknown[0].partition('=')[0]} is an option of {', '.join(others)}")
        own.error(text, unknown[0], own._option_string_actions)
    args.overrides = unknown
    try:
        file = None if found.log is None else open_log(found.log)
    except OSError as error:
        print(f"avgk: nothing can be logged to {found.log} ({error}).", file=sys.stderr)
        return 2
    with logged(file, words):
        return guarded(args.command, lambda: find(args.command).run(args))


if __name__ == "__main__":
    sys.exit(main())
