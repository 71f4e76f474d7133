"""How pictures look: colours, lines and hatches that everybody can tell apart, and fonts that have all characters."""

import logging as py_logging
import textwrap
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..files import new_file

logger = logging.get_logger(__name__)
# of Okabe and Ito, which everybody can tell apart; styles, markers and hatches tell series apart in grey
COLOURS = ["#0072B2", "#E69F00", "#000000", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"]
LINES = [("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (1, 1)), "v"), ((0, (5, 1)), "x")]
HATCHES = ["", "///", "...", "xx"]
MOST_CHARACTERS, MOST_IN_TITLE = 120, 400  # of a name, of a title with some
_said: set[str] = set()  # characters that no font draws; the first of them are said, once
_spelt_here: set[str] = set()  # names in the picture that is being drawn
FONTS = ("CJK", "Noto Sans", "Source Han", "WenQuanYi", "Unicode", "YaHei", "PingFang", "Hiragino", "Gothic")
NO_TEXT = ("Color", "Last Resort")  # emoji that matplotlib cannot draw, and boxes in place of every character


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: `pip install matplotlib`.") from error
    matplotlib.use("Agg")
    py_logging.getLogger("matplotlib.font_manager").addFilter(_is_no_weight)
    import matplotlib.pyplot as plt

    return plt


@lru_cache(maxsize=1024)
def _fonts(characters: frozenset[str]) -> tuple[list[str], set[str]]:
    """The fonts that draw these characters, matplotlib's own first, of those that are installed, and what none draws.

    The latter is said in one line, once.
    """
    pyplot()
    from matplotlib import font_manager

    own = font_manager.fontManager
    missing = {c for c in characters if c.isprintable() and not c.isspace()} - _drawn(own.findfont("DejaVu Sans"))
    families = ["DejaVu Sans"]
    text = [font for font in own.ttflist if not any(part in font.name for part in NO_TEXT)] if missing else []
    likely = sorted(text, key=lambda font: (not any(part in font.name for part in FONTS), font.name))
    for name in dict.fromkeys(font.name for font in likely):
        if found := missing & _drawn(own.findfont(name)):  # the face that will be drawn, not the first of the family
            families.append(name)
            missing -= found
        if not missing:
            break
    if missing and not _said:
        _said.update(missing)
        shown = " ".join(f"{c} (U+{ord(c):04X})" for c in sorted(missing)[:3])
        text = f"no font here draws e.g. {shown}, so pictures spell such names in Latin letters"
        logger.warning(f"{text}: install one, e.g. `apt install fonts-noto-cjk`, and draw again.")
    return families, missing


@lru_cache(maxsize=256)
def _drawn(path: str) -> set[str]:
    """The characters that a font file has."""
    from matplotlib import font_manager

    try:
        return {chr(code) for code in font_manager.get_font(path).get_charmap()}
    except (OSError, RuntimeError):  # bitmaps, or a broken file
        return set()


def _spelt(name: str) -> str:
    """A name with what no font here draws in Latin letters, syllable by syllable: `红嘴巨鸥` is Hong Zui Ju Ou."""
    missing = _fonts(frozenset(name))[1]
    if not missing:
        return name
    from anyascii import anyascii

    _spelt_here.add(name)
    return " ".join("".join(f" {anyascii(c)} " if c in missing else c for c in name).split())


def _is_no_weight(record: py_logging.LogRecord) -> bool:
    """Not that a font has one weight only, in which it is drawn."""
    return "font weight" not in record.getMessage()


@contextmanager
def readable(texts: Iterable[str]) -> Iterator[Any]:
    """Pyplot with fonts that have all characters of these texts; what cannot be drawn was said already."""
    plt = pyplot()
    families, _ = _fonts(frozenset("".join(texts)))
    with plt.rc_context({"font.family": families}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
        yield plt


@contextmanager
def drawn_axis(
    path: str | Path,
    xlabel: str,
    ylabel: str,
    title: str = "",
    height: float = 3.8,
    names: Iterable[str] = (),
    below: bool = False,
) -> Iterator[Any]:
    """Axes to draw on, which are then labelled and written; the legend may stand below them."""
    with readable([title, *names]) as plt:
        figure, axis = plt.subplots(figsize=(7, height), layout="constrained")
        yield axis
        axis.set(xlabel=xlabel, ylabel=ylabel)
        figure.suptitle(whole(title, 76, MOST_IN_TITLE), fontsize=11, x=0.02, ha="left")
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        if below:
            long = max(map(len, axis.get_legend_handles_labels()[1]), default=0) > 36
            figure.legend(loc="outside lower center", ncols=1 if long else 2, frameon=False, fontsize=9)
        elif axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
        save(figure, path)


def save(figure: Any, path: str | Path, **how: Any) -> None:
    path = Path(path)
    if _spelt_here:
        note = "some names in Latin letters, for want of a font"
        from matplotlib.transforms import Bbox

        width, height = figure.get_size_inches()
        figure.text(0.99, -0.02 / height, note, ha="right", va="top", fontsize=5, color="0.45")
        how = {"bbox_inches": Bbox([[0, -0.14], [width, height]]), **how}  # below all else
        _spelt_here.clear()
    with new_file(path if path.suffix else path.with_name(f"{path.name}.png")) as new:
        figure.savefig(new, dpi=130, **how)
    pyplot().close(figure)


def look(i: int) -> dict[str, Any]:
    """How the i-th line looks."""
    style, marker = LINES[i % len(LINES)]
    return {"linestyle": style, "marker": marker, "color": COLOURS[i % len(COLOURS)], "markersize": 4}


def whole(name: str, width: int = 60, most: int = MOST_CHARACTERS) -> str:
    """A name as it can be drawn, in lines of so many columns; matplotlib would read `$` as mathematics."""
    name = _spelt("".join(c if c.isprintable() else " " for c in name))
    name = name if len(name) <= most else name[: most - 1] + "…"
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in name)  # these take two columns
    width = width if not wide else max(round(width * len(name) / (len(name) + wide)), 1)
    name = name.replace("_", "_ ")  # where words of a file's name end, too
    lines, longest = textwrap.wrap(name, width), max(map(len, name.split()), default=0)
    # no word is left alone on a line, and none is broken for that
    while len(lines) > 1 and width > longest and len(even := textwrap.wrap(name, width - 1)) == len(lines):
        width, lines = width - 1, even
    return "\n".join(lines).replace("_ ", "_").replace("$", r"\$")
