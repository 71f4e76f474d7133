"""Pl@ntNet-300K as its authors distribute it: `images/{train,val,test}/<species id>/*.jpg` and metadata in JSON.

Only paths are listed; no image is opened or copied before it is needed.
"""

import os
from collections import Counter
from pathlib import Path

from datasets import DatasetDict

from ..configuration import read_json
from .datasets import distinct_names, make_split

SPLITS = {"train": "train", "validation": "val", "test": "test"}  # our names, and those of the folders
SPECIES_NAMES = ("plantnet300K_species_id_2_name.json", "plantnet300K_species_names.json")
METADATA = "plantnet300K_metadata.json"
ENDINGS = (".jpg", ".jpeg", ".png")


def is_plantnet(folder: Path) -> bool:
    """Whether the folder holds Pl@ntNet-300K's metadata."""
    return any((folder / name).is_file() for name in (*SPECIES_NAMES, METADATA))


def load_plantnet(folder: Path) -> DatasetDict:
    """List the images: splits train, validation and test with `image`, `label` and `index`.

    Labels are the species' scientific names. Their order is that of the species ids as text, which is the order of the
    folders in torchvision's `ImageFolder`, and so of the weights that others trained.

    Args:
        folder: The unpacked archive, `plantnet_300K`.
    """
    places = {split: _split_folder(folder, name) for split, name in SPLITS.items()}
    files = {
        split: {species.name: _images(species.path) for species in os.scandir(place) if species.is_dir()}
        for split, place in places.items()
    }
    listed: Counter = Counter()
    if (folder / METADATA).is_file():
        entries = read_json(folder / METADATA).values()
        listed.update(entry.get("split") for entry in entries if isinstance(entry, dict))
    ids = sorted(set().union(*files.values()))
    names = _names(folder, ids)
    splits = {}
    for split, by_species in files.items():
        rows = [(path, label) for label, species in enumerate(ids) for path in by_species.get(species, [])]
        if len(rows) < listed[SPLITS[split]]:  # an archive may have been unpacked in part
            raise ValueError(
                f"{places[split]} holds {len(rows)} images, but {METADATA} lists {listed[SPLITS[split]]}: unpack the"
                f" archive again, or remove {METADATA} to go on with what is there."
            )
        if not rows:
            raise ValueError(f"{places[split]} holds no images; they belong in {places[split]}/<species id>/.")
        paths, labels = map(list, zip(*rows, strict=True))
        splits[split] = make_split(split, paths, labels, names)
    return DatasetDict(splits)


def _split_folder(folder: Path, name: str) -> Path:
    for place in (folder / "images" / name, folder / f"images_{name}"):
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"{folder} has neither images/{name} nor images_{name}; name the unpacked folder that holds both the images"
        " and the metadata."
    )


def _images(species: str) -> list[str]:
    return sorted(file.path for file in os.scandir(species) if file.name.lower().endswith(ENDINGS))


def _names(folder: Path, ids: list[str]) -> list[str]:
    """The species' names in the order of their ids; where several species share a name, the id is put behind it."""
    path = next((folder / name for name in SPECIES_NAMES if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {' or '.join(SPECIES_NAMES)}, which names the species.")
    by_id = {species: str(name) for species, name in read_json(path).items()}
    unknown = [species for species in ids if species not in by_id]
    if unknown:
        raise ValueError(f"{path} has no name for {len(unknown)} species, e.g. the folder {unknown[0]!r}.")
    return distinct_names(ids, [by_id[species] for species in ids])
