"""CUB-200-2011 as its authors distribute it: photographs of 200 bird species with an official split.

The folder `CUB_200_2011` holds `images/<number>.<Species>/*.jpg` and lists of images, classes, labels and the split.
Only paths are listed; no image is opened or copied before it is needed.
"""

from pathlib import Path

from datasets import DatasetDict

from .boundary import listed_image
from .datasets import distinct_names, make_split, read_rows

IMAGES, LABELS, PARTS, CLASSES = (
    f"{name}.txt" for name in ("images", "image_class_labels", "train_test_split", "classes")
)
SPLITS = {"train": "1", "test": "0"}  # by what the list of the split says of an image


def is_cub(folder: Path) -> bool:
    """Whether the folder holds the four lists."""
    return all((folder / name).is_file() for name in (IMAGES, LABELS, PARTS, CLASSES))


def load_cub(folder: Path) -> DatasetDict:
    """List the images: the official splits train and test with `image`, `label` and `index`.

    Labels are the species' names without their numbers, `Black footed Albatross`, in the order of the numbers.

    Args:
        folder: The unpacked archive, `CUB_200_2011`.
    """
    images, labels, parts, classes = (dict(read_rows(folder / name, 2)) for name in (IMAGES, LABELS, PARTS, CLASSES))
    for name, found in ((LABELS, labels), (PARTS, parts)):
        if found.keys() != images.keys():
            raise ValueError(f"{folder / name} and {IMAGES} do not list the same images: unpack the archive again.")
    ids = list(classes)
    names = distinct_names(ids, [name.partition(".")[2].replace("_", " ") or name for name in classes.values()])
    place = {number: label for label, number in enumerate(ids)}
    splits = {}
    for split, mark in SPLITS.items():
        chosen = [image for image, part in parts.items() if part == mark]
        unknown = next((image for image in chosen if labels[image] not in place), None)
        if unknown is not None:
            raise ValueError(
                f"{folder / LABELS}: {CLASSES} has no class {labels[unknown]!r}, that of image {unknown}."
            )
        if not chosen:
            raise ValueError(f"{folder / PARTS} marks no image with {mark}, as those of {split} are.")
        paths = [listed_image(folder / IMAGES, folder / "images", images[image]) for image in chosen]
        splits[split] = make_split(split, paths, [place[labels[image]] for image in chosen], names)
    return DatasetDict(splits)
