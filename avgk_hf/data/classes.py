"""Which classes are meant: names decide, and positions only where the user says so or both sides are numbers."""

import csv
import difflib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset
from transformers.utils import logging

from ..calibration import Calibration
from ..checks import check_choice, is_number, read_json
from ..scores import smoothed_prevalence
from ..shell import printable
from .datasets import class_counts, class_ids, without_bars

logger = logging.get_logger(__name__)
Labels = str | Mapping[str, str | int]
MOST_CLASSES = 1_000_000


def nfc(name: Any) -> str:
    """A name as it is compared: one that looks the same is the same, whichever way its accents are written."""
    return unicodedata.normalize("NFC", str(name))


def letters(name: str) -> str:
    """A name without what is easily written otherwise: accents, case, underscores and spaces.

    >>> letters("Épicéa_commun")
    'epiceacommun'
    """
    kept = (c for c in unicodedata.normalize("NFKD", str(name)) if not unicodedata.combining(c))
    return "".join(kept).casefold().replace("_", "").replace(" ", "")


def nearest(name: str, names: Iterable[str], like: float = 0.6) -> str | None:
    """The name whose letters are most like those of another; None where none is.

    >>> nearest("Quercus_robur", ["Quercus rubra", "Quercus robur"])
    'Quercus robur'
    """
    plain = {letters(other): other for other in names}
    found = difflib.get_close_matches(letters(name), plain, 1, like)
    return plain[found[0]] if found else None


def class_names(labels: list[Any], place: str) -> list[str]:
    """The names of classes that are stored as text, sorted, or as whole numbers from 0; anything else is refused.

    Args:
        labels: What the column of classes holds, each at least once.
        place: What to call the column.
    """
    if any(label is None for label in labels):
        raise ValueError(f"{place} has missing values.")
    if all(isinstance(label, str) for label in labels):
        return sorted(set(map(nfc, labels)))
    if not all(type(label) is int for label in labels) or min(labels) < 0:
        raise ValueError(
            f"{place} holds neither text nor whole numbers from 0 in all splits, e.g. {str(labels[0])[:100]}; leave"
            " out images without a label, or with more than one."
        )
    if max(labels) >= MOST_CLASSES:
        raise ValueError(
            f"{place} holds {max(labels)}, and whole numbers count the classes from 0; write class names as text."
        )
    return [str(label) for label in range(max(labels) + 1)]


def with_classes(dataset: Dataset, names: list[str]) -> Dataset:
    """The dataset with `label` as ids of these names: text and the classes of a ClassLabel are matched by name."""
    feature, stored = dataset.features["label"], class_ids(dataset)
    if isinstance(feature, ClassLabel):
        class_counts(dataset, len(feature.names))
        stored = feature.int2str(stored)
    return _with_ids(dataset, ClassLabel(names=names).str2int(list(map(nfc, stored))), names)


def _with_ids(dataset: Dataset, ids: list[int], names: list[str]) -> Dataset:
    """The dataset with these labels (n,)."""
    with without_bars():
        relabelled = dataset.remove_columns("label").add_column("label", ids, feature=ClassLabel(names=names))
    return relabelled.select_columns(dataset.column_names)


def align_labels(dataset: Dataset, config: Any, labels: Labels = "name") -> Dataset:
    """The dataset with the model's class ids; a folder without images of some class has others.

    Args:
        dataset: One split of `load_splits`.
        config: A model's config with `id2label`.
        labels: How classes are matched, as in `match_classes`.
    """
    return _aligned(dataset, config, labels)[0]


def _aligned(dataset: Dataset, config: Any, labels: Labels) -> tuple[Dataset, list[int]]:
    """The same, and the model's ids of the dataset's classes."""
    names, known = dataset.features["label"].names, model_names(config)
    if not isinstance(dataset, Dataset):  # a stream, whose labels are looked at when they come
        ids = match_classes(names, config, labels)
        return dataset.with_ids(ids), ids
    class_counts(dataset, len(names))
    ids = match_classes(names, config, labels)
    if names == known[: len(names)]:
        return dataset, ids
    return _with_ids(dataset, [ids[label] for label in class_ids(dataset)], known), ids


def align_classes(
    dataset: Dataset, config: Any, labels: Labels = "name", calibrate: bool = False, restrict: bool = False
) -> tuple[Dataset, list[int] | None]:
    """`align_labels`, and the classes that sets may hold, None for all; where the dataset has others, it is said.

    Args:
        dataset: As in `align_labels`, or without labels.
        config: As in `align_labels`.
        labels: As in `align_labels`.
        calibrate: Whether the classes that sets may hold are to be chosen, or are those of the config's calibration.
        restrict: Whether to choose those of the dataset only.
    """
    if restrict and not calibrate:
        raise ValueError("classes_from_dataset says what K counts: calibrate with it, and evaluate afterwards.")
    answering = None if calibrate else Calibration.of(config).classes
    if "label" not in dataset.column_names:
        if labels != "name":
            raise ValueError("the images have no labels, so there are no classes to match: leave the label map out.")
        return dataset, answering
    dataset, ids = _aligned(dataset, config, labels)
    own, number = sorted(set(ids)), len(config.id2label)
    outside = [] if answering is None else set(own) - set(answering)
    if restrict and len(own) == number:
        raise ValueError(
            f"classes_from_dataset restricts sets to the classes of the dataset, and it has all {number} of the"
            " model: leave it out, or name only those classes in the dataset that it has images of."
        )
    if outside:
        logger.warning(
            f"{len(outside)} of the dataset's {len(own)} classes are none of the {len(answering)} that the model was"
            " calibrated for: no set can hold them, and their images count as misses."
        )
    elif answering is None and not restrict and len(own) < number:
        logger.warning(
            f"the dataset has {len(own)} of the model's {number} classes; sets may hold the others too, and K counts"
            " them: `avgk calibrate --classes-from-dataset` leaves them out."
        )
    return dataset, own if restrict else answering


def model_names(config: Any) -> list[str]:
    """The names of a model's classes; where two share one, the id is put behind it."""
    names = [str(config.id2label[i]) for i in range(len(config.id2label))]
    times = Counter(names)
    return [name if times[name] == 1 else f"{name} ({i})" for i, name in enumerate(names)]


def match_classes(names: list[str], config: Any, labels: Labels = "name") -> list[int]:
    """The model's id of each of a dataset's classes; one that cannot be told is refused.

    Names are compared in Unicode's form NFC. Where the model has a name twice, ids decide, if those of all other
    classes are the model's. Classes without a name, LABEL_0 and so on, are those that the dataset calls 0 and so on.

    Args:
        names: Of the dataset's classes.
        config: The model's config.
        labels: `"name"`; `"position"`, to take class i of the dataset for class i of the model; or a mapping of the
            dataset's names to the model's, or to ids where the model has a name twice. Others keep their name.

    Example:
        >>> from transformers import PreTrainedConfig
        >>> match_classes(["elm", "oak"], PreTrainedConfig(id2label={0: "ash", 1: "oak", 2: "elm"}))
        [2, 1]
    """
    numbers = list(range(len(names)))
    known = [str(config.id2label[i]) for i in range(len(config.id2label))]
    if labels == "position" and len(names) > len(known):
        raise ValueError(
            f"labels='position', but the dataset has {len(names)} classes and the model {len(known)}: class"
            f" {names[len(known)]!r} has no counterpart."
        )
    if labels == "position" or names == model_names(config)[: len(names)]:
        return numbers
    if isinstance(labels, str):
        check_choice("labels", labels, ("name", "position"))
    plain = known == [f"LABEL_{i}" for i in range(len(known))] and names == list(map(str, numbers))
    if plain and labels == "name":
        known = list(map(str, range(len(known))))
    places: dict[str, list[int]] = {}
    for i, name in enumerate(known):
        places.setdefault(nfc(name), []).append(i)
    wanted = names if isinstance(labels, str) else _translated(names, places, labels)
    found = [[name] if isinstance(name, int) else places.get(nfc(name), []) for name in wanted]
    shared = {i for ids in places.values() if len(ids) > 1 for i in ids}
    sure = [(j, ids) for j, ids in enumerate(found) if len(ids) == 1]
    if shared and sure and all(ids == [j] for j, ids in sure):
        by_id = [j for j in numbers if j in shared and len(found[j]) != 1]
        if by_id:
            logger.warning(
                printable(
                    f"{len(by_id)} classes are matched by their ids, because the model has more than one of their"
                    f" name: {', '.join(f'{names[j]!r} ({j})' for j in by_id[:3])}{', ...' * (len(by_id) > 3)}."
                )
            )
        found = [[j] if j in by_id else found[j] for j in numbers]
    _check_found(names, known, found)
    return [ids[0] for ids in found]


def _translated(names: list[str], places: dict[str, list[int]], label_map: Mapping[str, str | int]) -> list[str | int]:
    """The names as a label map has them; what in it is a name of neither side is refused."""
    given = {nfc(name): value for name, value in label_map.items()}
    own = set(map(nfc, names))
    unknown = [name for name in given if name not in own]
    if unknown and not own <= set(given):  # a map that has every class may have those of other datasets too
        raise ValueError(
            f"the label map has {unknown[0]!r}, which is no class of the dataset{_hint(unknown[0], names, 'it has')}:"
            " write `dataset's name,model's name`, or leave it out."
        )
    shared = {str(i): i for ids in places.values() if len(ids) > 1 for i in ids}
    found: list[str | int] = []
    for name in names:
        value = given.get(nfc(name), name)
        if nfc(name) in given and nfc(value) not in places and str(value) not in shared:
            raise ValueError(
                f"the label map has {value!r} for {name!r}, which is no class of the model"
                f"{_hint(str(value), places, 'it has')}: name it as in the model's config."
            )
        found.append(shared.get(str(value), value) if nfc(value) not in places else str(value))
    return found


def _hint(name: str, names: Iterable[str], who: str) -> str:
    near = nearest(name, names)
    return f" ({who} {near!r})" if near else ""


def _check_found(names: list[str], known: list[str], found: list[list[int]]) -> None:
    """Refuse classes that the model does not have, or more than once."""
    unknown = [name for name, ids in zip(names, found, strict=True) if not ids]
    if unknown:
        same = (
            ", or with --labels-by-position (`labels='position'`) if the order is the same"
            if len(names) == len(known)
            else ""
        )
        some = ", ".join(f"{name!r}{_hint(name, known, 'the model knows')}" for name in unknown[:5])
        some += f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ValueError(
            f"the dataset has {len(unknown)} class{'es' * (len(unknown) != 1)} that the model does not know,"
            f" {some}. Name the classes as in the model's config, translate them with --label-map FILE"
            f" (`labels={{...}}`){same}, or leave these images out."
        )
    for name, ids in zip(names, found, strict=True):
        if len(ids) > 1:
            raise ValueError(
                f"the model has {len(ids)} classes named {known[ids[0]]!r}, and the dataset's ids do not tell which of"
                f" them {name!r} is: say it with --label-map FILE (`labels={{...}}`), e.g. `{name},{ids[0]}`."
            )


def check_names(what: str, dataset: Any, config: Any) -> None:
    """Refuse labelled images whose classes have other names than the model's; a model without names takes any.

    Args:
        what: How the dataset is called in the error.
        dataset: Of which a ClassLabel is looked at, where there is one.
        config: The model's.
    """
    feature = dataset.features.get("label") if isinstance(dataset, Dataset) else None
    if not isinstance(feature, ClassLabel):
        return
    for i, name in enumerate(feature.names[: config.num_labels]):
        if (own := config.id2label[i]) not in (f"LABEL_{i}", name) and nfc(own) != nfc(name):
            raise ValueError(
                f"{what}: class {i} is {name!r} there and {own!r} in the model: build the model with"
                " `id2label=dict(enumerate(names))` of the dataset, or give the dataset the model's classes with"
                " `avgk_hf.data.align_labels`."
            )


def name_classes(config: Any, names: list[str]) -> None:
    """Give classes without names, only LABEL_0 and so on, those of a dataset that has as many."""
    if list(config.id2label.values()) == [f"LABEL_{i}" for i in range(len(names))]:
        config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}


def check_new_classes(splits: Mapping[str, Dataset], train: str = "train") -> None:
    """Refuse a class that has images in some split and none in that of the training.

    Args:
        splits: With the same classes in all of them.
        train: The name of the split to train on; without one nothing is refused.
    """
    if train not in splits or "label" not in splits[train].column_names:
        return
    names = splits[train].features["label"].names
    trained = set(class_ids(splits[train]))
    for split, dataset in splits.items():
        new = [i for i in sorted(set(class_ids(dataset)) - trained - {None}) if 0 <= i < len(names)]
        if new:
            name, others = names[new[0]], [names[i] for i in trained if i is not None and 0 <= i < len(names)]
            raise ValueError(
                f"split {split!r} has {len(new)} class{'es' * (len(new) > 1)} without an image in {train!r}, e.g."
                f" {name!r}{_hint(name, others, f'{train!r} has')}: name them alike, put images of them there, or say"
                " `allow_new_classes: true` (`allow_new_classes=True`)."
            )


def read_label_map(path: str | Path) -> dict[str, str | int]:
    """{a dataset's name: the model's name} from a JSON mapping, or from a CSV file with these two columns."""
    path = Path(path)
    if path.suffix.lower() == ".json":
        content = read_json(path)
        for name, value in content.items():
            if isinstance(value, bool) or not isinstance(value, (str, int)):
                raise ValueError(f"{path}: {name!r} is mapped to {value!r}, which is neither a name nor an id.")
        return content
    return dict(_two_columns(path, "dataset's name,model's name"))


def read_numbers(path: str | Path, config: Any, labels: Labels = "name") -> list[float]:
    """How frequent the model's classes are, (L,), from a JSON mapping or a CSV file of classes and numbers.

    Whole numbers are images, of which a class without any has 0; others are shares, above 0 for every class.

    Args:
        path: The file.
        config: The model's config.
        labels: How its classes are matched to the model's, as in `match_classes`.
    """
    path = Path(path)
    stored = read_json(path) if path.suffix.lower() == ".json" else _two_columns(path, "class,number")
    try:
        found = {name: float(value) for name, value in stored.items()}
    except (TypeError, ValueError):
        found = {"": -1.0}
    if not all(is_number(value) and 0 <= value < 2**53 for value in found.values()):
        raise ValueError(f"{path} must hold a number of images, or a share of them, for each class: `oak,120`.")
    ids = match_classes(list(found), config, labels)
    numbers = [0.0] * len(config.id2label)
    for i, value in zip(ids, found.values(), strict=True):
        numbers[i] += value
    if all(value.is_integer() for value in numbers):
        return smoothed_prevalence(numbers)
    if min(numbers) <= 0:
        raise ValueError(f"{path}: class {config.id2label[numbers.index(min(numbers))]!r} has no share above 0.")
    return numbers


def _two_columns(path: Path, columns: str) -> dict[str, str]:
    """{first: second} of a CSV file with two columns."""
    found: dict[str, str] = {}
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file ({error}): write `{columns}` in UTF-8.") from None
    for number, row in enumerate(rows, 1):
        if row and (len(row) != 2 or not all(row)):
            raise ValueError(f"{path}, line {number}: {row} are no two columns, `{columns}`.")
        if row and found.setdefault(row[0], row[1]) != row[1]:
            raise ValueError(f"{path}, line {number}: {row[0]!r} is mapped twice; keep one of them.")
    return found
