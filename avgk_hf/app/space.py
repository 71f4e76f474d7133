"""The page of `avgk app` as a folder for a Hugging Face Space, ready to push.

avgk app MODEL --space DIR
"""

import platform
from importlib import metadata
from pathlib import Path

from transformers.utils import logging

from ..checks import title_of
from ..classifiers import load_classifier
from ..files import leads_out
from ..hub import check_new, published, requirements, write_whole
from ..shell import NOUN
from .answers import Answers, chosen_examples, render

logger = logging.get_logger(__name__)


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
    folder, needs, gradio = check_new(folder, "--space"), requirements(), metadata.version("gradio")
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
        write_whole(folder, texts, copies)
    return render("space_push.txt", folder=folder, folder_literal=repr(str(folder)))
