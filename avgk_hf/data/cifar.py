"""CIFAR-100 as its authors distribute it: the folder `cifar-100-python` with the files `train`, `test` and `meta`.

The files are pickles. To unpickle can run any code, and with no name but numpy's own an array can be forged that
corrupts memory. So Python's own reader is cut down to the instructions that a dict of plain values needs: names are
never looked up, nothing is called, no object gets a state, and arrays are made here from their bytes.
"""

import itertools
import math
import pickle
import pickletools
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import DatasetDict

from ..checks import reason_of
from .datasets import make_split

SIDE = 32
FILES = ("train", "test", "meta")
MOST_BYTES = 2**28  # the archive's own files hold 155 million, in about 200,000 instructions
MOST_INSTRUCTIONS = 2_000_000
RECONSTRUCT = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
ENCODE = "_codecs.encode"  # how Python 3 writes bytes in an old protocol
NAMES = {"numpy.ndarray", "numpy.dtype", ENCODE, *RECONSTRUCT}
TYPES = ("u1", "i4", "i8")
PLAIN_DTYPE = (3, None, None, None, -1, -1, 0)  # its state but for the byte order: no fields, no objects
EMPTY = "an array without content"
# what a dict of plain values needs, in every protocol below 5
INSTRUCTIONS = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT
    BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 STRING BINSTRING
    SHORT_BINSTRING EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM
    SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"""
CODES = {getattr(pickle, name)[0] for name in INSTRUCTIONS.split()}


class _Name(str):
    """What a pickle asks for, or would have made: a dtype by its code, an array before it is filled."""


class _Fields(dict):
    """A dict of named values; to hash any other key may never end."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_text(key), value)


def _refuse(_: "_Reader") -> None:
    raise ValueError("it has an instruction that a dict of plain values does not need")


class _Reader(pickle._Unpickler):
    """Follows the instructions of one pickle; those that could reach an object are replaced."""

    encoded = 0  # characters, over all calls

    def find_class(self, module: str, name: str) -> _Name:
        asked = _Name(f"{module}.{name}")
        if asked not in NAMES:
            raise ValueError(f"it asks for {asked[:100]}")
        return asked

    def empty_dict(self) -> None:
        self.append(_Fields())

    def old_empty_dict(self) -> None:
        if self.pop_mark():
            raise ValueError("it holds a dict in a form that is never written")
        self.append(_Fields())

    def reduce(self) -> None:
        """What a call would give, of those that make arrays."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not _Name or type(arguments) is not tuple:
            raise ValueError("it calls what is no function")
        if function == ENCODE and len(arguments) == 2:
            self.encoded += len(_text(arguments[0]))
            if self.encoded > MOST_BYTES:
                raise ValueError(f"it unfolds to more than {MOST_BYTES} bytes")
            made: Any = _text(arguments[0]).encode("latin1")
        elif function == "numpy.dtype" and len(arguments) == 3:
            made = _Name(_text(arguments[0]))
            if made not in TYPES:
                raise ValueError(f"it holds an array of {made[:20]!r}, not of {', '.join(TYPES)}")
        elif function in RECONSTRUCT:
            made = _Name(EMPTY)
        else:
            raise ValueError(f"it calls {function} as numpy does not")
        self.append(made)

    def build(self) -> None:
        """A dtype with its byte order, or an array with its content; the state of either is accepted as numpy's."""
        state, made = self.stack.pop(), self.stack.pop()
        if type(made) is not _Name or type(state) is not tuple:
            raise ValueError("it sets the state of what is no array")
        if made == EMPTY:
            made = _array(*state)
        elif made not in TYPES or (state[0], *state[2:]) != PLAIN_DTYPE or _text(state[1]) not in ("|", "<"):
            raise ValueError("the state of a dtype is not numpy's")
        self.append(made)

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    dispatch |= dict.fromkeys(dispatch.keys() - CODES, _refuse)
    dispatch |= {pickle.EMPTY_DICT[0]: empty_dict, pickle.DICT[0]: old_empty_dict}
    dispatch |= {pickle.REDUCE[0]: reduce, pickle.BUILD[0]: build}


def _text(value: Any) -> str:
    if type(value) not in (str, bytes):
        raise ValueError(f"it holds a {type(value).__name__} where a name belongs")
    return value if isinstance(value, str) else value.decode("latin1")


def _array(_: Any, shape: Any, dtype: Any, fortran: Any, data: Any) -> np.ndarray:
    plain = type(shape) is tuple and len(shape) <= 4 and all(type(side) is int and side >= 0 for side in shape)
    if not plain or type(dtype) is not _Name or dtype not in TYPES or type(data) is not bytes:
        raise ValueError("the state of an array is not numpy's")
    if fortran not in (False, 0) or math.prod(shape) * int(dtype[1]) != len(data):
        raise ValueError("the shape of an array does not fit its bytes")
    return np.frombuffer(data, f"<{dtype}").reshape(shape)


def is_cifar_archive(folder: Path) -> bool:
    """Whether the folder holds the three files, and nothing that another reader would take."""
    return all((folder / name).is_file() for name in FILES)


def read_pickle(path: Path) -> dict[str, Any]:
    """A pickled dict of arrays, lists and bytes; one that asks for any other object is refused, and nothing is run."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES} bytes")
        data = path.read_bytes()
        if next(itertools.islice(pickletools.genops(data), MOST_INSTRUCTIONS, None), None) is not None:
            raise ValueError(f"it has more than {MOST_INSTRUCTIONS} instructions")
        content = _Reader(BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a broken pickle may raise anything
        raise ValueError(
            f"{path} cannot be read as CIFAR-100 ({reason_of(error)}); take it from cifar-100-python.tar.gz again."
        ) from error
    if not isinstance(content, _Fields):
        raise ValueError(f"{path} holds a {type(content).__name__}, not CIFAR-100's dict of arrays.")
    return content


def load_cifar(folder: Path, coarse: bool = False) -> DatasetDict:
    """Read the archive's folder: splits train and test with `image`, `label` and `index`.

    Args:
        folder: `cifar-100-python`.
        coarse: Take the 20 superclasses as labels, not the 100 classes.
    """
    kind = "coarse" if coarse else "fine"
    names = _items(folder / "meta", read_pickle(folder / "meta"), f"{kind}_label_names", (bytes, str))
    names = [name.decode() if isinstance(name, bytes) else name for name in names]
    splits = {}
    for split in ("train", "test"):
        path = folder / split
        content = read_pickle(path)
        labels, pixels = _items(path, content, f"{kind}_labels", (int,)), content.get("data")
        if not isinstance(pixels, np.ndarray):
            raise ValueError(f"{path} holds a {type(pixels).__name__} as 'data', not an array.")
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3 * SIDE * SIDE):
            raise ValueError(
                f"{path} holds {pixels.dtype} {pixels.shape} for {len(labels)} labels, not 3 x 32 x 32 bytes each."
            )
        if labels and not 0 <= min(labels) <= max(labels) < len(names):
            raise ValueError(f"{path} holds labels outside [0, {len(names)}), the classes that meta names.")
        header = f"P6 {SIDE} {SIDE} 255\n".encode()  # PPM, the one format that needs no encoder
        images = pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        stored = [{"bytes": header + image.tobytes(), "path": None} for image in images]
        splits[split] = make_split(split, stored, labels, names)
    return DatasetDict(splits)


def _items(path: Path, content: dict[str, Any], name: str, types: tuple[type, ...]) -> list[Any]:
    """A field that holds a list, or an array of one dimension."""
    if name not in content:
        raise ValueError(f"{path} has no {name!r}, only {sorted(content)[:9]}: is it CIFAR-100?")
    items = content[name]
    if isinstance(items, np.ndarray) and items.ndim == 1:
        items = items.tolist()
    if type(items) is not list or not all(type(item) in types for item in items):
        raise ValueError(f"{path}: {name!r} is no list of {types[0].__name__}: is it CIFAR-100?")
    return items
