"""The page of `avgk app` as a folder for a Hugging Face Space, ready to push.

avgk app MODEL --space DIR
"""

import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path

from huggingface_hub import SpaceCardData
from transformers.utils import logging

from ..classifiers import load_classifier
from ..files import copy_file, leads_out, make_folder, write_text
from ..hub import published
from .answers import Answers, chosen_examples
from .page import title_of

logger = logging.get_logger(__name__)
PACKAGE = Path(__file__).parent.parent
APP = '''\
"""The page of a set-valued classifier, written by `avgk app`; README.md says what this folder is."""

from pathlib import Path

from avgk_hf.app.answers import Answers, example_images
from avgk_hf.app.page import build_page, launch
from avgk_hf.classifiers import load_classifier

here = Path(__file__).parent
answers = Answers(load_classifier({model}))
launch(build_page(answers, {title!r}, example_images(answers, {examples})))
'''
CARD = """\
---
{front}
---

# {title}

Set-valued image classification: as many classes as the image needs, K on average. `app.py` shows the page, {where},
and `avgk_hf/` is the package that computes the sets. It runs anywhere with
`pip install -r requirements.txt && python app.py`.
"""
HOW_TO_PUSH = """\
written to {folder}. To put it on the Hub, log in with `hf auth login` and run in Python:

    from huggingface_hub import HfApi
    HfApi().create_repo("USER/NAME", repo_type="space", space_sdk="gradio", exist_ok=True)
    HfApi().upload_folder(repo_id="USER/NAME", repo_type="space", folder_path={folder!r})
"""


def write_space(name: str, folder: str | Path, examples: str | None = None) -> str:
    """Write the page as a Space: app.py, requirements.txt, README.md, the package, examples, and a local model.

    A model folder is copied, so that the Space works as it is; a model of the Hub stays there.

    Args:
        name: Folder or Hub id of a calibrated model.
        folder: Where to write; must be new or empty.
        examples: Folder of example images.

    Returns:
        How to push it.
    """
    folder = Path(folder)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"--space {folder} exists and is not an empty folder; name a new one.")
    texts = {"requirements.txt": _requirements()}
    answers, title, local = Answers(load_classifier(name)), title_of(name), Path(name).is_dir()
    front = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=importlib.metadata.version("gradio"),
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        app_file="app.py",
        models=None if local else [name],
        tags=["average-k", "image-classification"],
        short_description="As many classes as the image needs, K on average",
    )
    where = "`model/` holds the model" if local else f"the model is [{name}](https://huggingface.co/{name})"
    texts["README.md"] = CARD.format(front=front.to_yaml(), title=title, where=where)
    copies = {f"model/{file}": path for file, path in published(name).items()} if local else {}
    with chosen_examples(answers, examples) as found:
        chosen = [path for path, _ in found if not leads_out(path, examples and Path(examples))]
        if len(chosen) < len(found):
            logger.warning(f"left out {len(found) - len(chosen)} example(s): links that lead out of {examples}")
        copies |= {f"examples/{number}{path.suffix.lower()}": path for number, path in enumerate(chosen)}
        model = 'str(here / "model")' if local else repr(name)
        texts["app.py"] = APP.format(title=title, model=model, examples='here / "examples"' if chosen else "None")
        _write_whole(folder, texts, copies)
    return HOW_TO_PUSH.format(folder=str(folder))


def _requirements() -> str:
    """What a Space has to install: what this package needs, and the Gradio that is known to show the page."""
    try:
        needs = importlib.metadata.requires("avgk_hf") or []
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "what a Space has to install is read from the installed avgk_hf, and here its files are used without:"
            " `pip install 'avgk_hf[app]'`."
        ) from None
    needs = [text for text in needs if "extra ==" not in text]
    return "\n".join([*needs, f"gradio=={importlib.metadata.version('gradio')}"]) + "\n"


def _write_whole(folder: Path, texts: dict[str, str], copies: dict[str, Path]) -> None:
    """Write a folder with texts, copies of files and this package, or nothing."""
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    inside = folder if folder.is_dir() else parent  # an empty folder may be a volume of its own
    with tempfile.TemporaryDirectory(dir=inside, prefix=".avgk-space-") as unfinished:
        new = Path(unfinished)
        for name, text in texts.items():
            write_text(new / name, text)
        for name, path in copies.items():
            copy_file(path, new / name)
        shutil.copytree(PACKAGE, new / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "recipes"))
        make_folder(folder)
        for path in new.iterdir():
            shutil.move(path, folder / path.name)
