"""`glyphs`: generated images of look-alike characters, for demos and tests without a download.

120 characters of five alphabets and mathematics are drawn in eight faces of the DejaVu fonts that matplotlib ships,
32 x 32 grey. Latin A, Greek Alpha and Cyrillic A have one outline; O, Omicron, the zero and others differ by little
more than their size. No classifier can tell these apart, so the right answer is a set, of a size that depends on the
image. What is drawn:

- face: one of eight, uniformly (sans and serif, each regular, bold, oblique, bold oblique);
- place: rotation N(0, 5 degrees), scale exp N(0, 0.1) in each direction, shift N(0, 1 pixel);
- quality: a severity s uniform in [0, 1] sets blur (Gaussian, radius 1.5 s pixels), contrast (1 - 0.6 s) and noise
  (Gaussian, standard deviation 0.25 s of full scale): from clear to hopeless in equal parts.

Training counts follow a long tail like that of Pl@ntNet-300K: log-linear from 4 through 20 at the median and 100 at
the upper quartile to 300, so that half of the classes have fewer than 20 images and a quarter more than 100. Which
class is frequent is drawn once and the same for every seed. Validation and test labels are drawn from the resulting
class frequencies.

These numbers were fixed before any loss was trained on the data: the counts by the paper's dataset, the distortions by
eye, so that a person reads an image of severity 0 at once and one of severity 1 hardly.
"""

import unicodedata
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from huggingface_hub.utils import tqdm
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFilter, ImageFont

CHARACTERS = (
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZcijklopsuvwxyz"  # Latin
    "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩ"  # Greek
    "АБВГДЕЖЗИКЛМНОПРСТУФХЦЧШЪЫЬЭЮЯ"  # Cyrillic
    "ՕՏՍԼՈօոս"  # Armenian
    "∑∏∆∞∪∨∧×"  # mathematics
)
FACES = [f"DejaVuS{family}.ttf" for family in ("ans", "ans-Bold", "ans-Oblique", "ans-BoldOblique")] + [
    f"DejaVuSerif{style}.ttf" for style in ("", "-Bold", "-Italic", "-BoldItalic")
]
SIDE = 32
VALIDATION_IMAGES, TEST_IMAGES = 2000, 4000


def class_name(character: str) -> str:
    """A readable name that also tells doubles apart and can be a folder's name.

    >>> class_name("A"), class_name("Α"), class_name("0")
    ('A Latin capital a', 'Α Greek capital alpha', '0 digit zero')
    """
    words = unicodedata.name(character).replace("LETTER ", "").split()
    script = words[0].title() if words[0] in ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN") else words[0].lower()
    return " ".join([character, script, *(word.lower() for word in words[1:])])


def train_counts() -> np.ndarray:
    """The number of training images of each class, (120,)."""
    quantiles = (np.arange(len(CHARACTERS)) + 0.5) / len(CHARACTERS)
    counts = np.exp(np.interp(quantiles, [0, 0.5, 0.75, 1], np.log([4, 20, 100, 300])))
    return np.random.default_rng(0).permutation(np.floor(counts).astype(int))


@cache
def _outline(character: str, face: str) -> PILImage.Image:
    """The character, centred and white on black, at twice the final size."""
    import matplotlib

    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / face), 44)
    left, top, right, bottom = font.getbbox(character)
    image = PILImage.new("L", (2 * SIDE, 2 * SIDE))
    ImageDraw.Draw(image).text((SIDE - (left + right) / 2, SIDE - (top + bottom) / 2), character, fill=255, font=font)
    return image


def draw(character: str, rng: np.random.Generator) -> PILImage.Image:
    """One random image of a character.

    Example:
        >>> draw("A", np.random.default_rng(0)).size
        (32, 32)
    """
    outline = _outline(character, FACES[rng.integers(len(FACES))])
    angle, severity = np.deg2rad(rng.normal(0, 5)), rng.uniform()
    (scale_x, scale_y), (shift_x, shift_y) = np.exp(rng.normal(0, 0.1, 2)), rng.normal(0, 1, 2)
    cos, sin = 2 * np.cos(angle), 2 * np.sin(angle)  # outlines are drawn twice as large
    a, b, d, e = cos / scale_x, -sin / scale_y, sin / scale_x, cos / scale_y
    centre_x, centre_y = SIDE / 2 + shift_x, SIDE / 2 + shift_y
    affine = (a, b, SIDE - a * centre_x - b * centre_y, d, e, SIDE - d * centre_x - e * centre_y)
    image = outline.transform((SIDE, SIDE), PILImage.Transform.AFFINE, affine, PILImage.Resampling.BILINEAR)
    image = image.filter(ImageFilter.GaussianBlur(1.5 * severity))
    pixels = np.asarray(image, dtype=np.float32) * (1 - 0.6 * severity)
    pixels += rng.normal(0, 0.25 * 255 * severity, (SIDE, SIDE))
    return PILImage.fromarray(pixels.clip(0, 255).astype(np.uint8))


def load_glyphs(seed: int = 0, progress: bool = True) -> DatasetDict:
    """Generate the dataset: splits train, validation and test with `image`, `label` and `index`.

    Args:
        seed: Same seed, same images (for the same font files and Pillow version).
        progress: Show a progress bar.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("glyphs are drawn from matplotlib's fonts: `pip install 'avgk_hf[demo]'`.") from error
    counts = train_counts()
    rng = np.random.default_rng(seed)
    frequencies = counts / counts.sum()
    labels = {
        "train": rng.permutation(np.repeat(np.arange(len(counts)), counts)),
        "validation": rng.choice(len(counts), VALIDATION_IMAGES, p=frequencies),
        "test": rng.choice(len(counts), TEST_IMAGES, p=frequencies),
    }
    features = Features(
        image=Image(), label=ClassLabel(names=[class_name(c) for c in CHARACTERS]), index=Value("int64")
    )
    splits = {}
    with tqdm(total=sum(map(len, labels.values())), desc="glyphs", unit="image", disable=not progress) as bar:
        for split, of_split in labels.items():
            encoded = []
            for label in of_split:
                buffer = BytesIO()
                draw(CHARACTERS[label], rng).save(buffer, "PNG", compress_level=1)
                encoded.append({"bytes": buffer.getvalue(), "path": None})
                bar.update()
            columns = {"image": encoded, "label": of_split.tolist(), "index": list(range(len(of_split)))}
            splits[split] = Dataset.from_dict(columns, features=features, split=split)
    return DatasetDict(splits)


def write_image_folder(splits: DatasetDict, folder: str | Path) -> None:
    """Write the dataset as `folder/split/class name/index.png`, which `load_dataset("imagefolder")` reads.

    Names that cannot be a folder's are refused, before anything is written.
    """
    for split, dataset in splits.items():
        for name in (split, *dataset.features["label"].names):
            # `datasets` puts environment variables in the place of a `$NAME` when it reads the folder
            if name.strip(" .") == "" or not name.isprintable() or set(name) & set("/\\$") or len(name) > 200:
                raise ValueError(
                    f"the split or class {name!r} cannot be the name of a folder (empty, `..`, a slash, a dollar, a"
                    " control character, or too long); rename it."
                )
    for split, dataset in splits.items():
        names = dataset.features["label"].names
        for row in tqdm(dataset.cast_column("image", Image(decode=False)), desc=f"write {split}", unit="image"):
            path = Path(folder) / split / names[row["label"]] / f"{row['index']:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(row["image"]["bytes"])
