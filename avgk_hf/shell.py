"""What a command prints, and how it ends: errors and interruptions as one line and an exit code."""

import contextlib
import datetime
import io
import os
import re
import signal
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from typing import TextIO

from .files import nowhere

MASK = "***"
NOUN, MOST_LETTERS = "class/classes", 40  # what a class is called


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM, as job schedulers do."""


def _terminate(*_: object) -> None:
    raise Terminated


def printable(text: object) -> str:
    r"""Text of others, a label or a file's name, on one line: what would move the cursor or colour it is written out.

    >>> printable("oak\x1b[2J\n100.0000  elm")
    'oak\\x1b[2J\\n100.0000  elm'
    """
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def shortened(name: str, columns: int) -> str:
    """A name without its middle where it is longer than so many columns; wide characters take two."""
    width = len(name) + sum(unicodedata.east_asian_width(c) in "WF" for c in name)
    most = columns * len(name) // max(width, 1)
    return name if width <= columns else f"{name[: (most - 1) // 2]}…{name[-(most // 2) :]}"


def read_noun(noun: str) -> tuple[str, str]:
    """What a class is called, one and many.

    >>> read_noun("class/classes"), read_noun("species")
    (('class', 'classes'), ('species', 'species'))
    """
    one, _, many = noun.partition("/")
    if not one.strip() or len(noun) > MOST_LETTERS or not noun.isprintable():
        raise ValueError(f"--noun {noun[:MOST_LETTERS]!r} is no word; give e.g. `species`, or `bird/birds`.")
    return one.strip(), many.strip() or one.strip()


def _one_line(error: Exception) -> str:
    """The message of an error; one that a loader's process raised is the last line of the traceback it sent."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].partition(": ")[2] if "Traceback (most recent call last)" in str(error) else " ".join(lines)


def masked(text: str, *tokens: str | None) -> str:
    """A text without access tokens: those given, that of the environment, and what looks like one of the Hub."""
    for token in filter(None, (*tokens, *map(os.environ.get, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")))):
        text = text.replace(token, MASK)
    return re.sub("hf_[A-Za-z0-9]{20,}", MASK, text)


def without_tokens(arguments: list[str]) -> list[str]:
    """The arguments of a command for a log or a hint: the value of a field that holds a token is masked."""
    shown = []
    for before, text in zip(["", *arguments], arguments, strict=False):
        name, equals, _ = text.partition("=")
        if equals and is_secret(name):
            text = f"{name}={MASK}"
        elif before.startswith("--") and "=" not in before and is_secret(before) and not text.startswith("--"):
            text = MASK
        shown.append(masked(text))
    return shown


def is_secret(field: str) -> bool:
    """Whether a field or option of this name holds an access token."""
    return re.search("token(?!s)", field.lower()) is not None  # there are settings that count tokens


class _Tee(io.TextIOBase):
    """Writes to a stream as before, and every finished line to a log; of a progress bar its last state."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream, self.log, self.line = stream, log, ""

    def write(self, text: str) -> int:
        self.stream.write(text)
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            self.log.write(masked(printable(line.rstrip("\r").rpartition("\r")[2])) + "\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()
        self.log.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()


@contextlib.contextmanager
def logged(log: TextIO | None, arguments: list[str]) -> Iterator[None]:
    """Write to an open file what is printed meanwhile, after a line with time and command; None for no file."""
    if log is None:
        yield
        return
    with log:
        words = printable(" ".join(without_tokens(arguments)))
        log.write(f"{datetime.datetime.now().isoformat(' ', 'seconds')} avgk {words}\n")
        out, err = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield


def guarded(name: str, command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code, 0 for None; with AVGK_DEBUG=1 errors come with their traceback."""
    main_thread = threading.current_thread() is threading.main_thread()  # only there signals can be handled
    before = signal.signal(signal.SIGTERM, _terminate) if main_thread else None
    try:
        return command() or 0
    except KeyboardInterrupt as stop:
        print(f"\navgk {name}: {printable(stop) or 'stopped.'}", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    except BrokenPipeError:  # of `| head`, which has read enough
        nowhere(sys.stdout)
        return 141  # as a shell has it
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("AVGK_DEBUG"):
            raise
        print(f"avgk {name}: {printable(masked(_one_line(error)))}", file=sys.stderr)
        return 2
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, before)


def number_remedy(text: str) -> str:
    """What may be meant by what is no number."""
    if text.endswith("%") and text[:-1].isdecimal():
        return f"; a share is written without %: {int(text[:-1]) / 100:g} for {text}"
    if re.fullmatch(r"\d+,\d+", text):
        return f"; a fraction has a point, {text.replace(',', '.')}, several have spaces, {text.replace(',', ' ')}"
    if "," in text:
        return "; several have spaces between them and no commas, e.g. 1 2 5"
    return "; images and folders stand before this option" if os.path.exists(text) else ""
