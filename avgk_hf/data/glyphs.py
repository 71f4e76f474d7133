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
from collections.abc import Iterable
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from datasets import DatasetDict, Image
from huggingface_hub.utils import tqdm
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFilter, ImageFont

from ..files import make_folder, new_file
from .datasets import make_split

CHARACTERS = (
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZcijklopsuvwxyz"  # Latin
    "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩ"  # Greek
    "АБВГДЕЖЗИКЛМНОПРСТУФХЦЧШЪЫЬЭЮЯ"  # Cyrillic
    "ՕՏՍԼՈօոս"  # Armenian
    "∑∏∆∞∪∨∧×"  # mathematics
)
STYLES = "Sans Sans-Bold Sans-Oblique Sans-BoldOblique Serif Serif-Bold Serif-Italic Serif-BoldItalic"
FACES = [f"DejaVu{style}.ttf" for style in STYLES.split()]
SIDE = 32
NOISE = 0.25 * 255  # standard deviation at severity 1
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


def _nuisance(rng: np.random.Generator) -> tuple[str, tuple[float, ...], float]:
    """What is drawn besides the character and the noise: face, place (an affine map) and severity."""
    face = FACES[rng.integers(len(FACES))]
    angle, severity = np.deg2rad(rng.normal(0, 5)), rng.uniform()
    (scale_x, scale_y), (shift_x, shift_y) = np.exp(rng.normal(0, 0.1, 2)), rng.normal(0, 1, 2)
    cos, sin = 2 * np.cos(angle), 2 * np.sin(angle)  # outlines are drawn twice as large
    a, b, d, e = cos / scale_x, -sin / scale_y, sin / scale_x, cos / scale_y
    centre_x, centre_y = SIDE / 2 + shift_x, SIDE / 2 + shift_y
    affine = (a, b, SIDE - a * centre_x - b * centre_y, d, e, SIDE - d * centre_x - e * centre_y)
    return face, affine, severity


def _without_noise(character: str, face: str, affine: tuple[float, ...], severity: float) -> np.ndarray:
    """The image (32, 32) that the noise is added to."""
    image = _outline(character, face).transform(
        (SIDE, SIDE), PILImage.Transform.AFFINE, affine, PILImage.Resampling.BILINEAR
    )
    image = image.filter(ImageFilter.GaussianBlur(1.5 * severity))
    return np.asarray(image, dtype=np.float32) * (1 - 0.6 * severity)


def _add_noise(pixels: np.ndarray, severity: float, rng: np.random.Generator) -> np.ndarray:
    pixels = pixels + rng.normal(0, NOISE * severity, (SIDE, SIDE))
    return pixels.astype(np.float32).clip(0, 255).astype(np.uint8)


def draw(character: str, rng: np.random.Generator) -> PILImage.Image:
    """One random image of a character.

    Example:
        >>> draw("A", np.random.default_rng(0)).size
        (32, 32)
    """
    face, affine, severity = _nuisance(rng)
    return PILImage.fromarray(_add_noise(_without_noise(character, face, affine, severity), severity, rng))


def outline_bound(ks: Iterable[float]) -> dict[float, float]:
    """The best average-K accuracy of a classifier that is told face and outline: an exact upper bound.

    Classes whose outlines are the same to the bit in a face cannot be told apart by anything; their probabilities are
    the class frequencies within the group. Blur, noise and unknown place are ignored, so no classifier of images
    reaches it.

    Args:
        ks: Average set sizes.
    """
    priors = train_counts() / train_counts().sum()
    groups: dict[tuple[str, bytes], list[int]] = {}
    for face in FACES:
        for label, character in enumerate(CHARACTERS):
            groups.setdefault((face, _outline(character, face).tobytes()), []).append(label)
    weights = [priors[labels].sum() / len(FACES) for labels in groups.values()]
    posteriors = np.zeros((len(groups), len(CHARACTERS)))
    for row, labels in zip(posteriors, groups.values(), strict=True):
        row[labels] = priors[labels] / priors[labels].sum()
    return _best_accuracy(posteriors, np.asarray(weights), ks)


def noise_bound(ks: Iterable[float], images: int = 2000, seed: int = 0) -> dict[float, dict[str, float]]:
    """The best average-K accuracy of a classifier that is told face, place and severity, estimated on drawn images.

    Given these, every class has one image without noise, and the probability of the pixels under the noise gives the
    exact probabilities of the classes. What it is told, no classifier of images knows, so this too is an upper bound
    of theirs, but one that blur and noise have lowered.

    Args:
        ks: Average set sizes.
        images: Number of images to draw.
        seed: Seed of the drawing; labels follow the class frequencies.

    Returns:
        For each K the `accuracy`, and the most that the `standard_error` of so many images can be.
    """
    rng = np.random.default_rng(seed)
    priors = train_counts() / train_counts().sum()
    posteriors = np.empty((images, len(CHARACTERS)))
    for row in tqdm(posteriors, desc="best possible", unit="image", disable=None):
        label = rng.choice(len(CHARACTERS), p=priors)
        face, affine, severity = _nuisance(rng)
        means = np.stack([_without_noise(c, face, affine, severity) for c in CHARACTERS])  # (L, 32, 32)
        pixels = _add_noise(means[label], severity, rng)
        row[:] = _class_probabilities(pixels, means, NOISE * severity, priors)
    accuracies = _best_accuracy(posteriors, np.full(images, 1 / images), ks)
    return {
        k: {"accuracy": value, "standard_error": float(np.sqrt(max(value * (1 - value), 0) / images))}
        for k, value in accuracies.items()
    }


def _class_probabilities(pixels: np.ndarray, means: np.ndarray, deviation: float, priors: np.ndarray) -> np.ndarray:
    """P(class | pixels), (L,), of pixels = floor(clip(mean + noise, 0, 255)) for the `means` (L, 32, 32)."""
    from scipy.special import ndtr

    deviation = max(deviation, 1e-3)
    low = np.where(pixels == 0, -np.inf, (pixels - means) / deviation)
    high = np.where(pixels == 255, np.inf, (pixels + 1.0 - means) / deviation)
    low, high = np.where(low > 0, -high, low), np.where(low > 0, -low, high)  # in the tail that does not cancel
    logs = np.log(np.maximum(ndtr(high) - ndtr(low), 1e-300)).sum((1, 2)) + np.log(priors)
    chances = np.exp(logs - logs.max())
    return chances / chances.sum()


def _best_accuracy(posteriors: np.ndarray, weights: np.ndarray, ks: Iterable[float]) -> dict[float, float]:
    """The accuracy of the best sets of average size K: the pairs of image and class, most probable first.

    Args:
        posteriors: P(class | image), (n, L).
        weights: P(image), (n,).
        ks: Average set sizes.
    """
    order = np.argsort(-posteriors, axis=None, kind="stable")
    sizes = np.cumsum(np.broadcast_to(weights[:, None], posteriors.shape).reshape(-1)[order])
    accuracies = np.cumsum((weights[:, None] * posteriors).reshape(-1)[order])
    # of the pair at the border a fraction, as a classifier that decides by lot would take
    return {k: float(np.interp(k, np.r_[0, sizes], np.r_[0, accuracies])) for k in ks}


def load_glyphs(seed: int = 0, progress: bool = True, times: int = 1) -> DatasetDict:
    """Generate the dataset: splits train, validation and test with `image`, `label` and `index`.

    Args:
        seed: Same seed, same images (for the same font files and Pillow version).
        progress: Show a progress bar.
        times: So many times the training images of every class, to see what more data would give.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("glyphs are drawn from matplotlib's fonts: `pip install 'avgk_hf[demo]'`.") from error
    counts = train_counts()
    rng = np.random.default_rng(seed)
    frequencies = counts / counts.sum()
    labels = {
        "train": rng.permutation(np.repeat(np.arange(len(counts)), times * counts)),
        "validation": rng.choice(len(counts), VALIDATION_IMAGES, p=frequencies),
        "test": rng.choice(len(counts), TEST_IMAGES, p=frequencies),
    }
    names = [class_name(character) for character in CHARACTERS]
    splits = {}
    with tqdm(total=sum(map(len, labels.values())), desc="glyphs", unit="image", disable=not progress or None) as bar:
        for split, of_split in labels.items():
            encoded = []
            for label in of_split:
                buffer = BytesIO()
                draw(CHARACTERS[label], rng).save(buffer, "PNG", compress_level=1)
                encoded.append({"bytes": buffer.getvalue(), "path": None})
                bar.update()
            splits[split] = make_split(split, encoded, of_split.tolist(), names)
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
        make_folder(make_folder(folder) / split)
        names = dataset.features["label"].names
        rows = dataset.cast_column("image", Image(decode=False))
        for row in tqdm(rows, desc=f"write {split}", unit="image", disable=None):
            with new_file(Path(folder) / split / names[row["label"]] / f"{row['index']:05d}.png") as new:
                new.write_bytes(row["image"]["bytes"])
