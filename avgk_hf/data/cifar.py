"""CIFAR-100 as its authors distribute it: the folder `cifar-100-python` with the files `train`, `test` and `meta`.

The files are pickles. To unpickle can run any code, and with no name but numpy's own an array can be forged that
corrupts memory. So nothing is unpickled: `pickletools` splits a file into its instructions, those that a dict of plain
values needs are followed here, and arrays are made from their bytes.
"""

import math
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value

SIDE = 32
FILES = ("train", "test", "meta")
MOST_BYTES = 2**28  # the archive's own files hold 155 million, in about 200,000 instructions
MOST_INSTRUCTIONS = 2_000_000
RECONSTRUCT = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
ENCODE = "_codecs.encode"  # how Python 3 writes bytes in an old protocol
NAMES = {"numpy.ndarray", "numpy.dtype", ENCODE, *RECONSTRUCT}
TYPES = ("u1", "i4", "i8")
VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
STATED = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
STATED |= {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
PYTHON_2 = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # text whose encoding is not stated: bytes
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(str):
    """What a pickle asks for by its name; it is never looked up."""


class _Dtype(str):
    """A type of numbers, by its code."""


class _Array:
    """Numpy's empty array, which a pickle makes first and fills later."""

    content: np.ndarray | None = None


class _Reader:
    """Follows the instructions of one pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: dict[int, Any] = {}
        self.encoded = 0  # characters, over all calls

    def read(self, data: bytes) -> Any:
        """What a pickle holds."""
        for number, (instruction, argument, _) in enumerate(pickletools.genops(data)):
            if number == MOST_INSTRUCTIONS:
                raise ValueError(f"it has more than {MOST_INSTRUCTIONS} instructions")
            self.follow(instruction.name, argument)
        return self.stack.pop()

    def follow(self, name: str, argument: Any) -> None:
        """Do one instruction."""
        stack = self.stack
        if name in STATED:
            stack.append(argument)
        elif name in PYTHON_2:
            stack.append(argument.encode("latin1"))
        elif name in VALUES:
            stack.append(VALUES[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in TUPLES:
            stack.append(tuple(self.popped(len(stack) - TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self.popped(self.marks.pop())))
        elif name == "LIST":
            stack.append(self.popped(self.marks.pop()))
        elif name == "DICT":
            items = self.popped(self.marks.pop())
            stack.append({})
            self.set_items(items)
        elif name in ("APPEND", "APPENDS"):
            items = self.popped(len(stack) - 1 if name == "APPEND" else self.marks.pop())
            if type(stack[-1]) is not list:
                raise ValueError("it appends to what is no list")
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            self.set_items(self.popped(len(stack) - 2 if name == "SETITEM" else self.marks.pop()))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            asked = argument.split(" ") if name == "GLOBAL" else self.popped(len(stack) - 2)
            stack.append(_Name(".".join(_text(part) for part in asked)))
            if stack[-1] not in NAMES:
                raise ValueError(f"it asks for {stack[-1][:100]}")
        elif name == "REDUCE":
            function, arguments = self.popped(len(stack) - 2)
            stack.append(self.call(function, arguments))
        elif name == "BUILD":
            made, state = self.popped(len(stack) - 2)
            stack.append(_build(made, state))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"it has the instruction {name}")

    def popped(self, height: int) -> list[Any]:
        """What lies on the stack above a height, taken off."""
        if not (self.marks[-1] if self.marks else 0) <= height <= len(self.stack):
            raise ValueError("its instructions do not fit each other")
        items = self.stack[height:]
        del self.stack[height:]
        return items

    def set_items(self, items: list[Any]) -> None:
        """Put keys and values into the dict on the stack."""
        keys = items[::2]
        if type(self.stack[-1]) is not dict or not all(type(key) in (str, bytes) for key in keys):
            raise ValueError("it holds a dict whose keys are no names")
        self.stack[-1].update(zip(keys, items[1::2], strict=True))

    def call(self, function: Any, arguments: Any) -> Any:
        """What a call would give, of those that make arrays."""
        if type(function) is not _Name or type(arguments) is not tuple:
            raise ValueError("it calls what is no function")
        if function == ENCODE and len(arguments) == 2:
            self.encoded += len(_text(arguments[0]))
            if self.encoded > MOST_BYTES:
                raise ValueError(f"it unfolds to more than {MOST_BYTES} bytes")
            return _text(arguments[0]).encode("latin1")
        if function == "numpy.dtype" and len(arguments) == 3:
            code = _text(arguments[0])
            if code not in TYPES:
                raise ValueError(f"it holds an array of {code[:20]!r}, not of {', '.join(TYPES)}")
            return _Dtype(code)
        if function in RECONSTRUCT:
            return _Array()
        raise ValueError(f"it calls {function} as numpy does not")


def _text(value: Any) -> str:
    if type(value) not in (str, bytes):
        raise ValueError(f"it holds a {type(value).__name__} where a name belongs")
    return value if isinstance(value, str) else value.decode("latin1")


def _build(made: Any, state: Any) -> Any:
    """A dtype with its byte order, or an array with its content; the state of either is only accepted as numpy's."""
    if type(state) is not tuple or (type(made), len(state)) not in ((_Dtype, 8), (_Array, 5)):
        raise ValueError("it sets the state of what is no array")
    if isinstance(made, _Dtype):
        order = _text(state[1])
        if order not in ("|", "<") or (state[0], *state[2:]) != (3, None, None, None, -1, -1, 0):
            raise ValueError("the state of a dtype is not numpy's")
        return made
    _, shape, dtype, fortran, data = state
    plain = type(shape) is tuple and len(shape) <= 4 and all(type(side) is int and side >= 0 for side in shape)
    if not plain or type(dtype) is not _Dtype or type(fortran) not in (bool, int) or type(data) is not bytes:
        raise ValueError("the state of an array is not numpy's")
    if fortran or math.prod(shape) * int(dtype[1]) != len(data):
        raise ValueError("the shape of an array does not fit its bytes")
    made.content = np.frombuffer(data, f"<{dtype}").reshape(shape)
    return made


def is_cifar_archive(folder: Path) -> bool:
    """Whether the folder holds the three files, and nothing that another reader would take."""
    return all((folder / name).is_file() for name in FILES)


def read_pickle(path: Path) -> dict[str, Any]:
    """A pickled dict of arrays, lists and bytes; one that asks for any other object is refused, and nothing is run.

    Args:
        path: `train`, `test` or `meta`.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES} bytes")
        content = _Reader().read(path.read_bytes())
    except Exception as error:  # a broken pickle may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{path} cannot be read as CIFAR-100 ({reason}); take it from cifar-100-python.tar.gz again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not CIFAR-100's dict of arrays.")
    return {_text(name): value.content if isinstance(value, _Array) else value for name, value in content.items()}


def load_cifar(folder: Path, coarse: bool = False) -> DatasetDict:
    """Read the archive's folder: splits train and test with `image`, `label` and `index`.

    Args:
        folder: `cifar-100-python`.
        coarse: Take the 20 superclasses as labels, not the 100 classes.
    """
    kind = "coarse" if coarse else "fine"
    names = _items(folder / "meta", read_pickle(folder / "meta"), f"{kind}_label_names", (bytes, str))
    names = [name.decode() if isinstance(name, bytes) else name for name in names]
    features = Features(image=Image(), label=ClassLabel(names=names), index=Value("int64"))
    splits = {}
    for split in ("train", "test"):
        path = folder / split
        content = read_pickle(path)
        pixels, labels = _field(path, content, "data"), _items(path, content, f"{kind}_labels", (int,))
        if not isinstance(pixels, np.ndarray):
            raise ValueError(f"{path} holds a {type(pixels).__name__} as 'data', not an array.")
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3 * SIDE * SIDE):
            raise ValueError(
                f"{path} holds {pixels.dtype} {pixels.shape} for {len(labels)} labels, not 3 x 32 x 32 bytes each."
            )
        if labels and not 0 <= min(labels) <= max(labels) < len(names):
            raise ValueError(f"{path} holds labels outside [0, {len(names)}), the classes that meta names.")
        images = pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        header = f"P6 {SIDE} {SIDE} 255\n".encode()  # PPM, the one format that needs no encoder
        columns = {
            "image": [{"bytes": header + image.tobytes(), "path": None} for image in images],
            "label": labels,
            "index": list(range(len(labels))),
        }
        splits[split] = Dataset.from_dict(columns, features=features, split=split)
    return DatasetDict(splits)


def _field(path: Path, content: dict[str, Any], name: str) -> Any:
    if name not in content:
        raise ValueError(f"{path} has no {name!r}, only {sorted(content)[:9]}: is it CIFAR-100?")
    return content[name]


def _items(path: Path, content: dict[str, Any], name: str, types: tuple[type, ...]) -> list[Any]:
    """A field that holds a list, or an array of one dimension."""
    items = _field(path, content, name)
    if isinstance(items, np.ndarray) and items.ndim == 1:
        items = items.tolist()
    if type(items) is not list or not all(type(item) in types for item in items):
        raise ValueError(f"{path}: {name!r} is no list of {types[0].__name__}: is it CIFAR-100?")
    return items
