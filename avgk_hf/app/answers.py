"""What the page asks a model: the set of an image and how it grows, and which images make good examples.

Scores and sets come from the parts that `avgk predict` calls. The HTML is that of `templates/`, which take every value
of a model's records as text.
"""

import base64
import io
import logging
import math
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, select_autoescape
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration import Calibration
from ..checks import near_folder
from ..classifiers import forward, transform_for
from ..data import image_files
from ..data.classes import model_names
from ..data.glyphs import CHARACTERS, class_name, draw
from ..files import make_folder
from ..questions import Question
from ..rows import Row, row, write_csv
from ..scope import promise
from ..scores import head_logits
from ..sets import k_key
from ..shell import NOUN, read_noun

logger = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent / "templates"
PARTS = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=select_autoescape(["html"]), trim_blocks=True)
ROWS = 200  # classes of a set that are shown; thousands would be megabytes for every step of the slider
RUNNERS_UP = 3  # classes below the threshold that are shown
NAMES = 6  # class names in one row of the growth table
MOST_SCORES = 2**17  # that a session keeps for a table
EXAMPLES, LOOKED_AT = 8, 64  # example images shown, and those they are chosen from


def render(template: str, **values: Any) -> str:
    """A part of the page, or a file of a Space; in HTML the values are text."""
    return PARTS.get_template(template).render(values).strip()


def message(text: str, role: str) -> str:
    """A sentence in the place of an answer."""
    return render("message.html", text=text, role=role)


def question_text(k: float = 0, coverage: float | None = None) -> str:
    """A question as the page spells it: `3`, or `90%`."""
    return k_key(k) if coverage is None else f"{100 * coverage:g}%"


class Answers:
    """The answers of a calibrated classifier, and all that the page knows of its calibration.

    Args:
        model: A classifier of any class; one that was not calibrated is refused.
        noun: What the page calls a class: a word, or `one/many`.
    """

    def __init__(self, model: PreTrainedModel, noun: str = NOUN) -> None:
        self.noun, (self.one, self.many) = noun, read_noun(noun)
        self.model, self.config, self.transform = model, model.config, transform_for(model)
        calibration = Calibration.of(self.config)
        calibration.threshold()  # refuses a model without
        self.k, self.ks = float(calibration.k), calibration.ks
        self.names = set(self.config.id2label.values())
        self.source, self.probabilities = calibration.source, calibration.probabilities
        self.balance, self.balances, self.tradeoff = calibration.balance, calibration.balances, calibration.tradeoff
        told = (promise(calibration) or "").partition(". ")[0].replace("true class", f"true {self.one}")
        self.promise = told[:1].upper() + told[1:]
        views = [calibration.at(balance) for balance in self.balances]
        self.levels = [level for level in calibration.levels() if all(level in view.levels() for view in views)]
        self.heads = {view.head(k) for view in views for k in self.ks}  # one, unless `head="auto"`
        # images of one table: 16, or as many as a session may keep the scores of
        self.at_once = max(1, min(16, MOST_SCORES // (len(self.heads) * self.config.num_labels)))

    def count(self, number: int) -> str:
        """`1 class`, `3 classes`."""
        return f"{number} {self.one if number == 1 else self.many}"

    def true_name(self, path: Path) -> str:
        """The class of an image whose folder has the name of one, or nothing."""
        name = unicodedata.normalize("NFC", path.parent.name)
        return name if name in self.names and not name.startswith(".") else ""

    def rows(self, name: str, scores: dict[str, Tensor] | str, asked: str, also: float, balance: float) -> list[Row]:
        """The sets of an image for all recorded K or coverages, and for `also`, or why there are none."""
        found = []
        for value in sorted({*(self.ks if asked == "k" else self.levels), also}):
            if isinstance(scores, str):
                found.append(row(name, (asked, value), [], scores, balance=balance))
                continue
            classes, own, lambda_val = self.image_set(scores, **{asked: value, "balance": balance})
            labels = [{"label": self.config.id2label[j], "score": own[j].item()} for j in classes]
            found.append(row(name, (asked, value), labels, None, lambda_val, balance))
        return found

    def table_html(self, images: list[tuple[str, Any]], left: Sequence[str] = (), **question: float) -> str:
        """Several images with their sets, and those of all that is recorded as a file that the page itself holds.

        Args:
            images: Of each its name and its scores, or why it has none.
            left: Images that were left out.
            question: As of `image_set`.
        """
        balance = question.pop("balance", self.balance)
        ((asked, value),) = question.items()
        rows = [each for name, scores in images for each in self.rows(name, scores, asked, value, balance)]
        file = io.StringIO()
        write_csv(file)(rows)
        shown = []
        for each in (each for each in rows if each[asked] == value):
            names = [item["label"] for item in each["set"][:NAMES]]
            left_over = len(each["set"]) - NAMES
            more = f"and {left_over} more" if left_over > 0 else ""
            shown.append({**each, "names": names, "more": more})
        data = base64.b64encode(file.getvalue().encode("utf-8-sig")).decode()
        told = {"asked": self._asked(balance, **{asked: value}), "every": "K" if asked == "k" else asked}
        told["broken"] = sum(each["error"] is not None for each in shown)
        return render("several.html", shown=shown, many=self.many, data=data, left=left, most=self.at_once, **told)

    def _asked(self, balance: float, **question: float) -> str:
        """A question as the page says it."""
        name = question_text(**question)
        text = f"K = {name}" if "k" in question else f"{name} coverage"
        return f"{text}, balance {balance:g}" if balance or self.balance else text

    @torch.no_grad()
    def scores(self, pixels: Tensor) -> dict[str, Tensor]:
        """The scores (1, L) of an image (C, H, W) without balance, of every head that answers for some K."""
        logits, plain = head_logits(forward(self.model.eval(), pixels[None])), Calibration.of(self.config).at(0)
        return {head: plain.scores(*logits, head) for head in sorted(self.heads)}

    def image_set(self, scores: dict[str, Tensor], **question: float) -> tuple[list[int], Tensor, float]:
        """The set of one image: its classes, best first, the scores (L,) of the head that answers, the threshold.

        Args:
            scores: As `scores` gives them.
            question: `k` or `coverage`, and `balance`; default: the model's own.
        """
        calibration = Calibration.of(self.config).at(question.get("balance"))
        answer = calibration.answer(Question(min_size=1, **question))  # as in the pipeline
        own = calibration.balanced(scores[answer.head])
        return answer.classes(own)[0], own[0], answer.lambda_val

    def html(self, scores: dict[str, Tensor], **question: float) -> tuple[str, str]:
        """The set of one image as a table, and how it grows; the arguments are those of `image_set`."""
        return self._set_html(scores, question), self._growth_html(scores, question)

    def _set_html(self, scores: dict[str, Tensor], question: dict[str, float]) -> str:
        """The classes with bars, and the best ones below the threshold in grey."""
        classes, own, lambda_val = self.image_set(scores, **question)
        values, inside, shown = own.tolist(), set(classes), classes[:ROWS]
        order = own.argsort(descending=True, stable=True).tolist()
        below = list(islice((j for j in order if j not in inside and values[j] > -math.inf), RUNNERS_UP))
        ends = [lambda_val, *(values[j] for j in (*shown, *below))]
        low, high = (0.0, 1.0) if self.probabilities else (min(ends), max(ends))  # logits have no fixed range

        def place(value: float) -> float:
            return 100 * (value - low) / ((high - low) or 1)

        def row(j: int) -> dict[str, Any]:
            tiny = self.probabilities and values[j] < 0.001
            text = "< 0.001" if tiny else f"{values[j]:.3f}"
            return {"id": j, "label": self.config.id2label[j], "bar": place(values[j]), "score": text}

        balance = question.get("balance", self.balance)
        plain = {name: value for name, value in question.items() if name != "balance"}
        return render(
            "set.html",
            number=self.count(len(classes)),
            one=self.one,
            many=self.many,
            asked=self._asked(balance, **plain),
            worth=self._worth(question.get("k"), balance),
            balanced=bool(balance),
            promise=self.promise if "coverage" in question else "",
            shown=map(row, shown),
            more=len(classes) - len(shown),
            below=map(row, below),
            lambda_val=lambda_val,
            mark=place(lambda_val),
            empty=bool(own[classes[0]] < lambda_val),
        )

    def _worth(self, k: float | None, balance: float) -> str:
        """What sets of this kind were worth on the images of the calibration, where that is recorded."""
        names = ("all images", f"mean over {self.many}", f"{self.many} with few training images")
        known = [row for row in self.tradeoff if row[1] == balance]
        if k is None or not known:
            return ""
        nearest = min(known, key=lambda row: abs(row[0] - k))
        shares = [f"{name} {share:.1%}" for name, share in zip(names, nearest[2:5], strict=True) if share is not None]
        return ", ".join(shares) + (f", for K = {k_key(nearest[0])}" if nearest[0] != k else "")

    def _growth_html(self, scores: dict[str, Tensor], question: dict[str, float]) -> str:
        """For every recorded K, or coverage, the size, and the classes that join; the one asked for is marked."""
        held = {name: value for name, value in question.items() if name == "balance"}
        ((asked, value),) = (item for item in question.items() if item[0] != "balance")
        known = self.levels if asked == "coverage" else self.ks
        steps, before = [], set()
        for step in sorted({*known, value}):  # smallest sets first
            classes, own, lambda_val = self.image_set(scores, **{asked: step}, **held)
            joined = [j for j in classes if j not in before]
            names = [self.config.id2label[j] for j in joined[:NAMES]]
            if len(joined) > NAMES:
                names.append(f"and {len(joined) - NAMES} more")
            name, left = question_text(**{asked: step}), not before.issubset(classes)
            guess = bool(own[classes[0]] < lambda_val)
            size = len(classes)
            steps.append(
                {"name": name, "now": step == value, "size": size, "names": names, "left": left, "guess": guess}
            )
            before = set(classes)
        return render("growth.html", asked="K" if asked == "k" else asked, steps=steps, many=self.many)


def example_images(answers: Answers, folder: str | Path | None) -> list[tuple[Path, int]]:
    """Example images with the sizes of their sets at the model's own K, from clear to hopeless.

    Args:
        answers: Of the model.
        folder: Images to choose from; those that cannot be read are left out. None for no examples.
    """
    if folder is None:
        return []
    found = image_files(folder)
    if not found:
        near = near_folder(str(folder))
        remedy = f"did you mean {near!r}?" if near else "give a folder with PNG or JPEG files."
        reason = "holds no images" if Path(folder).is_dir() else "is no folder"
        raise ValueError(f"--examples {folder} {reason}; {remedy}")
    sized, faults = [], []
    for path in dict.fromkeys([*_evenly(found, LOOKED_AT), *found]):  # the others where some cannot be read
        try:
            pixels = answers.transform.image(path)
        except (ValueError, OSError) as error:
            faults.append(str(error))
            continue
        classes, scores, _ = answers.image_set(answers.scores(pixels))
        sized.append((len(classes), -scores.max().item(), path))
        if len(sized) == LOOKED_AT:
            break
    if not sized:
        raise ValueError(f"--examples {folder}: none of the {len(faults)} images can be read, e.g. {faults[0]}")
    if faults:
        number = f"{len(faults)} image{'s' * (len(faults) > 1)}"
        logger.warning(f"--examples {folder}: left out {number} that cannot be read, e.g. {faults[0]}")
    most = math.ceil(EXAMPLES / len({size for size, *_ in sized}))  # of a size, or nearly all were clear
    groups = groupby(sorted(sized), key=itemgetter(0))
    some = [each for _, group in groups for each in _evenly(list(group), most)]
    return [(path, size) for size, _, path in _evenly(some, EXAMPLES)]


@contextmanager
def chosen_examples(answers: Answers, folder: str | None) -> Iterator[list[tuple[Path, int]]]:
    """`example_images` of a folder; without one, of glyphs that are drawn, if the model's classes are those."""
    with tempfile.TemporaryDirectory(prefix="avgk-app-") as drawn:
        # by id: a file may hold them in another order
        if folder is None and model_names(answers.config) == [class_name(each) for each in CHARACTERS]:
            rng = np.random.default_rng(0)
            for number, character in enumerate(rng.choice(list(CHARACTERS), LOOKED_AT)):
                draw(character, rng).save(make_folder(Path(drawn, class_name(character))) / f"glyph_{number:02d}.png")
            folder = drawn
        yield example_images(answers, folder)


def _evenly(items: list, most: int) -> list:
    """At most so many of the items, the first and the last among them."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)]
