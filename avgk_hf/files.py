"""All writing of this package: `new_file` gives a whole file or none, `replacing` a whole folder or none.

Inside an unfinished folder both write in place: only the outermost of them renames. A folder of a model or a run may
come from others, and a link in it may lead anywhere: nothing is written through one. This file travels with a saved
model as remote code.
"""

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

UNFINISHED = ".unfinished"  # folder inside a folder that is being written, and how names of unfinished files begin


@contextmanager
def new_file(path: str | os.PathLike) -> Iterator[Path]:
    """Give a fresh empty file to write to, which takes the place of `path` when all is written.

    A link at `path` is replaced, not followed. The file has the ending of `path`, which many libraries go by.
    """
    path = Path(path)
    make_folder(path.parent)
    # a device is not replaced by a file, nor what leads to one: who runs in a container may do so
    if path.absolute().parent == Path("/dev") or (path.exists() and not (path.is_file() or path.is_dir())):
        raise OSError(f"{path} is no regular file; name a new file.")
    new = path.with_name(f"{UNFINISHED}-{secrets.token_hex(8)}{path.suffix}")
    if UNFINISHED in path.parts:
        path.unlink(missing_ok=True)
        new = path
    try:
        new.touch(exist_ok=False)
        yield new
        os.replace(new, path)
    except BaseException as error:
        new.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(new):
            error.filename, error.filename2 = str(path), None
        raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    with new_file(path) as new:
        new.write_bytes(text.encode())


def copy_file(source: str | os.PathLike, path: str | os.PathLike) -> None:
    """Copy the content of a file."""
    with new_file(path) as new:
        shutil.copyfile(source, new)


def open_log(path: str | os.PathLike) -> TextIO:
    """Open a file to append text to, which must be a file of its own: no link of either kind, no device, no pipe."""

    def opener(name: str, flags: int) -> int:
        # a link made since then is not followed, and a pipe without reader not waited for; Windows has neither
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)

    file = open(refuse_link(path), "a", encoding="utf-8", opener=opener)
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        file.close()
        raise OSError(f"{path} is no regular file, or one that has another name too; name a new file")
    return file


def nowhere(stream: TextIO) -> None:
    """Let what is still to be written to a stream, whose reader has gone, vanish."""
    with suppress(OSError, ValueError):  # of a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def refuse_link(path: str | os.PathLike) -> Path:
    """Refuse a link in the place of what is to be written to: it may lead out of what others packed."""
    path = Path(path)
    if path.is_symlink():
        raise OSError(f"{path} is a link to {os.path.realpath(path)}; nothing is written through it, name that.")
    return path


def make_folder(folder: str | os.PathLike) -> Path:
    """Make a folder to write to, where there is none; a link is refused."""
    folder = refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def output_folder(folder: str | os.PathLike) -> Path:
    """`make_folder`, for one in which libraries write by themselves: links in it that lead out are refused as well."""
    folder = make_folder(folder)
    for path in sorted(folder.iterdir()):
        if leads_out(path):
            raise OSError(f"{path} is a link that leads out of the folder, and files are written there; remove it.")
    return folder


def check_output_dir(folder: str | os.PathLike, option: str = "output_dir", keep: bool = False) -> None:
    """Refuse a folder that cannot be written to, before anything else is done; one that is made stays if asked for."""
    made = [] if keep else [path for path in (Path(folder), *Path(folder).parents) if not path.exists()]
    try:
        output_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
    except OSError as error:
        raise OSError(
            f"{option}={str(folder)!r} cannot be written to ({error.strerror or error}); choose another `{option}`."
        ) from error
    finally:
        with suppress(OSError):  # of another process that writes there by now
            for path in made:
                path.rmdir()


def leads_out(path: Path, folder: Path | None = None) -> bool:
    """Whether a path leads out of a folder, by default its own, through links."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder or path.parent))


def fresh_folder(folder: str | os.PathLike) -> Path:
    """Make an empty folder in the place of whatever is there."""
    folder = Path(folder)
    remove(folder)
    folder.mkdir(parents=True)  # not `exist_ok`: then what is there would be taken, and it may be a link
    return folder


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(folder: str | os.PathLike) -> Iterator[Path]:
    """Give a new folder to write to, whose files replace those of `folder` when all of them are written.

    A process that is killed, or runs out of space, while it writes leaves `folder` as it was. Killed in the moment of
    replacing, it leaves it without config.json, and such a folder is refused.
    """
    folder = make_folder(folder)
    if UNFINISHED in folder.parts:
        yield folder
        return
    new = folder / UNFINISHED
    try:
        fresh_folder(new)
        yield new
        names = {path.name for path in new.iterdir()}
        for name in names:
            if (folder / name).is_dir():  # or a link to one: in the way, so it goes while config.json is still there
                remove(folder / name)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError) or "os error" in str(error):  # as libraries in Rust call it
            raise OSError(f"{folder} could not be written ({error}); what was there before is unchanged.") from error
        raise
    if "config.json" in names and any(new.glob("*.safetensors*")):
        # first away, last back: a folder without it is refused, new weights with old thresholds would not be
        (folder / "config.json").unlink(missing_ok=True)
        stale = {path.name for path in folder.glob("model*.safetensors*")} - names  # of another number of shards
        for name in stale if any(new.glob("model*.safetensors*")) else ():
            (folder / name).unlink()
    umask = os.umask(0)
    os.umask(umask)
    for name in sorted(names, key=lambda name: name == "config.json"):
        if (new / name).is_file():
            os.chmod(new / name, 0o666 & ~umask)  # safetensors makes files that nobody else may read
        os.replace(new / name, folder / name)
    new.rmdir()
