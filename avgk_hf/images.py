"""Opening an image, the same way for training, prediction and the page, whoever it comes from.

Like the model, this file travels with a saved model as remote code.
"""

import os
import stat
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .checks import reason_of

# decoders that are known to start no program and to fetch nothing; AVIF and HEIF where Pillow has them
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "HEIF")
MOST_ELONGATED = 200  # longer side to shorter; resizing the shorter side of a thinner image can take all memory
MOST_SCANS = 500  # of a progressive JPEG, usually 10; each is a pass over all pixels, for some 40 bytes of the file
ORIENTATION, TILE_WIDTH, TILE_LENGTH = 0x0112, 0x0142, 0x0143  # tags of EXIF and TIFF


def open_image(image: Any, mode: str = "RGB", name: str | None = None, most_pixels: int | None = None) -> Image.Image:
    """Open a path, bytes, or a stored `{"bytes", "path"}` in the given mode; an unreadable one is refused by name.

    Every way to a prediction and to training goes through here, so that the same file always gives the same pixels:
    upright by its EXIF orientation, transparency on white, 16-bit grey scaled to 8 bit, the first frame of an
    animation. Only regular files in `FORMATS` are opened, and the size is checked before anything is decoded.

    Args:
        image: A path, encoded bytes, a dict with `bytes` and `path`, or an open Pillow image.
        mode: `"RGB"` or `"L"`.
        name: What to call the image in an error.
        most_pixels: The largest image that is decoded; default Pillow's own limit.

    Example:
        >>> open_image(Image.new("RGBA", (1, 1), (0, 0, 0, 0))).getpixel((0, 0))
        (255, 255, 255)
    """
    is_open = isinstance(image, Image.Image)
    stored = image if isinstance(image, dict) else {"bytes" if isinstance(image, bytes) else "path": image}
    data, path = stored.get("bytes"), getattr(image, "filename", None) if is_open else stored.get("path")
    name = name or str(path or "the image")
    if not is_open and data is None and path is None:
        raise ValueError(f"{name} is missing: the row holds no image; remove it.")
    try:
        if is_open:
            return _plain(image, mode)
        with _regular_file(path) if data is None else BytesIO(data) as file, _header(file, most_pixels) as opened:
            return _plain(opened, mode)
    except FileNotFoundError:
        raise FileNotFoundError(f"{name}: there is no such file; check the path.") from None
    except UnidentifiedImageError as error:  # whose message names an object of Python
        raise ValueError(
            f"{name} cannot be read as an image (it is none of {', '.join(known_formats())}); replace or remove it."
        ) from error
    except Exception as error:  # decoders of broken files raise anything, from SyntaxError to struct.error
        raise ValueError(f"{name} cannot be read as an image ({reason_of(error)}); replace or remove it.") from error


def known_formats() -> list[str]:
    """The names of `FORMATS` that this installation of Pillow can open."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _regular_file(path: str | os.PathLike) -> BinaryIO:
    """Open a file for reading: a pipe would wait for ever, and a device never end."""
    # without waiting, and looked at only then: what is opened is what was looked at
    descriptor = os.open(os.fspath(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ValueError("it is no regular file" if status.st_size or not stat.S_ISREG(status.st_mode) else "it is empty")


def _header(file: BinaryIO, most_pixels: int | None) -> Image.Image:
    """The image with nothing decoded yet; one that announces more than can be afforded is refused."""
    image = Image.open(file, formats=known_formats())
    limit = most_pixels or Image.MAX_IMAGE_PIXELS
    tags = getattr(image, "tag_v2", {})
    # the tile of a TIFF is decoded whole, and may be larger than the image
    for width, height in (image.size, (tags.get(TILE_WIDTH, 0), tags.get(TILE_LENGTH, 0))):
        if limit and width * height > limit:
            raise ValueError(f"{width} x {height} pixels, the limit is {limit}")
    if image.format in ("JPEG", "MPO"):
        file.seek(0)
        if file.read().count(b"\xff\xda") > MOST_SCANS:
            raise ValueError(f"a JPEG of more than {MOST_SCANS} scans")
    return image


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """The image upright and opaque, with 8 bits for each channel."""
    if min(image.size) == 0 or max(image.size) > MOST_ELONGATED * min(image.size):
        raise ValueError(
            f"{image.width} x {image.height} pixels, and no side may be 0 or {MOST_ELONGATED} times the other"
        )
    # PNG and PPM are the formats whose "I" is known to hold 16 bits
    wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if image.mode in ("I", "F") and not wide:
        raise ValueError(f"its mode is {image.mode!r}, 32 bits of unknown range: save it with 8 or 16 bits")
    image.load()
    clear = image.info.get("transparency", -1)
    try:
        turned = image.getexif().get(ORIENTATION, 1) in range(2, 9)
    except Exception:  # broken metadata of an image that is none the worse for it
        turned = False
    if turned:
        image = ImageOps.exif_transpose(image)
    if wide:  # Pillow would cut these off at 255
        pixels = np.asarray(image).astype(np.uint16, copy=False)  # wider numbers would take four times the memory
        grey = (pixels // 257).astype(np.uint8)
        grey += pixels % 257 > 128
        grey[pixels == clear] = 255
        image = Image.fromarray(grey)
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)
