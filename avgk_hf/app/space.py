"""The page of `avgk app` as a folder for a Hugging Face Space, ready to push.

avgk app MODEL --space DIR
"""

import platform
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from transformers.utils import logging

from ..checks import title_of
from ..classifiers import load_classifier
from ..files import copy_file, leads_out, make_folder, write_text
from ..hub import published
from .answers import NOUN, Answers, chosen_examples, render

logger = logging.get_logger(__name__)
PACKAGE = Path(__file__).parent.parent


def write_space(name: str, folder: str | Path, examples: str | None = None, noun: str = NOUN) -> str:
    """Write the page as a Space: app.py, requirements.txt, README.md, the package, examples, and a local model.

    A model folder is copied, so that the Space works as it is; a model of the Hub stays there.

    Args:
        name: Folder or Hub id of a calibrated model.
        folder: Where to write; must be new or empty.
        examples: Folder of example images.
        noun: What the page calls a class, as in `Answers`.

    Returns:
        How to push it.
    """
    folder = Path(folder)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"--space {folder} exists and is not an empty folder; name a new one.")
    needs, gradio = _requirements(), metadata.version("gradio")
    answers, title, on_hub = Answers(load_classifier(name), noun), title_of(name), not Path(name).is_dir()
    copies = {} if on_hub else {f"model/{file}": path for file, path in published(name).items()}
    with chosen_examples(answers, examples) as found:
        chosen = [path for path, _ in found if not leads_out(path, examples and Path(examples))]
        if len(chosen) < len(found):
            logger.warning(f"left out {len(found) - len(chosen)} example(s): links that lead out of {examples}")
        for number, path in enumerate(chosen):  # in the folder of its class, where that is known
            copies[str(Path("examples", answers.true_name(path), f"{number}{path.suffix.lower()}"))] = path
        python = ".".join(platform.python_version_tuple()[:2])
        texts = {
            "app.py": render(
                "space_app.txt",
                model=repr(name) if on_hub else "",
                title=repr(title),
                examples=chosen,
                noun=repr(noun),
            ),
            "README.md": render(
                "space_readme.md", model=name if on_hub else "", title=title, gradio=gradio, python=python
            ),
            "requirements.txt": "\n".join([*needs, f"gradio=={gradio}"]),
        }
        _write_whole(folder, texts, copies)
    return render("space_push.txt", folder=folder, folder_literal=repr(str(folder)))


def _requirements() -> list[str]:
    try:
        return [text for text in metadata.requires("avgk_hf") or [] if "extra ==" not in text]
    except metadata.PackageNotFoundError:
        raise ImportError(
            "what a Space has to install is read from the installed avgk_hf, and here its files are used without:"
            " `pip install 'avgk_hf[app]'`."
        ) from None


def _write_whole(folder: Path, texts: dict[str, str], copies: dict[str, Path]) -> None:
    """Write a folder with texts, copies of files and this package, or nothing."""
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    inside = folder if folder.is_dir() else parent  # an empty folder may be a volume of its own
    with tempfile.TemporaryDirectory(dir=inside, prefix=".avgk-space-") as unfinished:
        new = Path(unfinished)
        for name, text in texts.items():
            write_text(new / name, f"{text}\n")
        for name, path in copies.items():
            copy_file(path, new / name)
        shutil.copytree(PACKAGE, new / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "recipes"))
        make_folder(folder)
        for path in new.iterdir():
            shutil.move(path, folder / path.name)
