"""A stand-in for the config of any class, and questions to it in one line."""

from types import SimpleNamespace

from torch import Tensor

from avgk_hf.calibration import DETAILS, Answer, Calibration, Question


class Config(SimpleNamespace):
    """A config with these fields; `coverage`, `curve` and `head_thresholds` go to where a calibration keeps them."""

    def __init__(self, **fields):
        kept = {name: fields.pop(name) for name in DETAILS if name in fields}
        super().__init__(**fields)
        if kept:
            self.calibration = {**(fields.get("calibration") or {}), **kept}

    def keep(self, **details) -> "Config":
        """Replace some details of the calibration, or say more about it."""
        self.calibration = {**(getattr(self, "calibration", None) or {}), **details}
        return self

    @property
    def coverage(self):
        return self.calibration["coverage"]


def resolve(config, **question) -> Answer:
    return Calibration.of(config).answer(Question(**question))


def answer(scores: Tensor, config, **question) -> Tensor:
    """The sets of images as a mask (n, L)."""
    return resolve(config, **question).sets(scores)


def threshold(config, k=None) -> float:
    return Calibration.of(config).threshold(k)
