"""CIFAR-100 as its authors distribute it: the folder `cifar-100-python` with the files `train`, `test` and `meta`.

The files are pickles, and a pickle can run any code when it is read. These are read with an unpickler that knows
nothing but numpy arrays and plain values.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value

SIDE = 32
FILES = ("train", "test", "meta")
_reconstruct = np.zeros(0).__reduce__()[0]  # numpy moved it between versions
ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    # how Python 3 writes bytes in an old protocol; the real function would look up any encoding by name
    ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def is_cifar_archive(folder: Path) -> bool:
    """Whether the folder holds the three files, and nothing that another reader would take."""
    return all((folder / name).is_file() for name in FILES)


def read_pickle(path: Path) -> dict[str, Any]:
    """A pickled dict of arrays, lists and bytes; one that asks for any other object is refused, and nothing is run.

    Args:
        path: `train`, `test` or `meta`.
    """
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="bytes").load()
    except Exception as error:  # a broken pickle may raise anything
        raise ValueError(
            f"{path} cannot be read as CIFAR-100 ({error}); take it from cifar-100-python.tar.gz again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not CIFAR-100's dict of arrays.")
    return {name.decode() if isinstance(name, bytes) else str(name): value for name, value in content.items()}


def load_cifar(folder: Path, coarse: bool = False) -> DatasetDict:
    """Read the archive's folder: splits train and test with `image`, `label` and `index`.

    Args:
        folder: `cifar-100-python`.
        coarse: Take the 20 superclasses as labels, not the 100 classes.
    """
    kind = "coarse" if coarse else "fine"
    meta = read_pickle(folder / "meta")
    names = _field(meta, f"{kind}_label_names", folder / "meta")
    names = [name.decode() if isinstance(name, bytes) else str(name) for name in names]
    features = Features(image=Image(), label=ClassLabel(names=names), index=Value("int64"))
    splits = {}
    for split in ("train", "test"):
        path = folder / split
        content = read_pickle(path)
        pixels, labels = np.asarray(_field(content, "data", path)), _field(content, f"{kind}_labels", path)
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3 * SIDE * SIDE):
            raise ValueError(
                f"{path} holds {pixels.dtype} {pixels.shape} for {len(labels)} labels, not 3 x 32 x 32 bytes each."
            )
        images = pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        header = f"P6 {SIDE} {SIDE} 255\n".encode()  # PPM, the one format that needs no encoder
        columns = {
            "image": [{"bytes": header + image.tobytes(), "path": None} for image in images],
            "label": [int(label) for label in labels],
            "index": list(range(len(labels))),
        }
        splits[split] = Dataset.from_dict(columns, features=features, split=split)
    return DatasetDict(splits)


def _field(content: dict[str, Any], name: str, path: Path) -> Any:
    if name not in content:
        raise ValueError(f"{path} has no {name!r}, only {sorted(content)}: is it CIFAR-100?")
    return content[name]
