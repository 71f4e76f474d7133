"""The page of `avgk app`: drop an image, choose K, see the set and how it grows.

    avgk app MODEL                 serves the page on this machine
    avgk app MODEL --space DIR     writes it as a folder for a Hugging Face Space

Scores and sets come from the parts that `avgk predict` calls. What one visitor does stays in his session: the scores
of the image live in a `gr.State`. Nothing is fetched from other machines.
"""

import html
import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import SpaceCardData
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from .calibrate import load_classifier, model_scores, transform_for
from .data.glyphs import CHARACTERS, class_name, draw
from .data.transforms import ImageTransform
from .hub import NOT_PUSHED, PUSHED
from .pipeline import config_score
from .sets import k_key, predict_sets, ranked_sets, stored_head, stored_threshold

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the page is a Gradio app: `pip install 'avgk_hf[app]'`.") from error

EXAMPLES, LOOKED_AT = 8, 64  # example images shown, and those they are chosen from
NAMES = 6  # class names in one row of the growth table
RUNNERS_UP = 3  # classes below the threshold that are shown
BY_SIZE, BY_COVERAGE = "average size", "coverage"
CSS = """
#avgk-image img { width: 100%; height: 100%; object-fit: contain; }
#avgk-image.small img { image-rendering: pixelated; }
#avgk-examples { border: 0 !important; background: none; }
#avgk-examples .grid-wrap { height: auto; min-height: 0; max-height: none; overflow: visible; padding: 0; }
#avgk-examples .grid-container { grid-template-columns: repeat(4, minmax(0, 1fr)); padding: 0; gap: .5rem; }
#avgk-examples img { object-fit: contain; image-rendering: pixelated; }
#avgk-examples .caption-label { font-size: .75rem; padding: .05rem .3rem; max-width: 100%; }
#avgk-growth:not(:has(.avgk)) { display: none; }
.avgk h2 { margin: 0 0 .4rem; font-size: 1.05rem; }
.avgk p { margin: 0 0 .5rem; }
.avgk .count { font-size: 1.5rem; font-weight: 650; }
.avgk .quiet, .avgk thead th, .avgk .below th, .avgk .below td.number { color: var(--body-text-color); opacity: .75; }
.avgk .quiet, .avgk thead th { font-size: .85rem; }
.avgk .alert { border-left: 4px solid #b91c1c; padding: .6rem .8rem; overflow-wrap: anywhere; }
.avgk .scroll { max-height: 26rem; overflow-y: auto; margin-bottom: .5rem; }
.avgk table { width: 100%; border-collapse: collapse; border: 0; margin: 0; table-layout: fixed; }
.avgk tr { border: 0; border-bottom: 1px solid var(--border-color-primary); }
.avgk th, .avgk td { padding: .25rem .5rem; border: 0; text-align: left; vertical-align: middle; font-weight: 400; }
.avgk td.number, .avgk th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.avgk .set .in th { font-weight: 600; }
.avgk .track { position: relative; height: 1rem; background: var(--background-fill-secondary); }
.avgk .bar { height: 100%; min-width: 2px; background: #2563eb; }
.avgk .below .bar { background: #94a3b8; }
.avgk .mark { position: absolute; top: -.3rem; bottom: -.3rem; width: 2px; background: #c2410c; }
.avgk .key { display: inline-block; width: 2px; height: .9em; margin: 0 .4em 0 .2em; background: #c2410c; }
.avgk .growth .now th, .avgk .growth .now td { background: var(--background-fill-secondary); font-weight: 600; }
"""
HINT = "Drop an image, or choose one of the examples."


def recorded_ks(config: Any) -> list[float]:
    """The average set sizes that a model is calibrated for, ascending."""
    return sorted(float(key) for key in config.thresholds)


def coverage_thresholds(config: Any) -> dict[str, float]:
    """{coverage as text: lambda_val} of the conformal calibration (LAC), empty where there is none."""
    return dict((getattr(config, "coverage", None) or {}).get("lac") or {})


def image_scores(model: PreTrainedModel, transform: ImageTransform, path: str | Path) -> dict[str, Tensor]:
    """The scores (1, L) of an image, of every head that answers for some recorded K: one, unless `head="auto"`."""
    pixels = transform.image(path)[None]
    heads = {stored_head(model.config, k): k for k in recorded_ks(model.config)}
    return {head: model_scores(model, pixels, k) for head, k in heads.items()}


def set_of(scores: Tensor, lambda_val: float) -> list[int]:
    """The classes of one image, best first; at least one, as in the pipeline."""
    return ranked_sets(scores, predict_sets(scores, lambda_val, min_size=1))[0]


def count(classes: Sequence[int] | int) -> str:
    """`1 class`, `3 classes`."""
    number = classes if isinstance(classes, int) else len(classes)
    return f"{number} class{'es' * (number != 1)}"


def set_html(config: Any, scores: Tensor, lambda_val: float, question: str) -> str:
    """The set of one image as a table with bars, and the best classes below the threshold in grey.

    Args:
        config: The model's config.
        scores: Scores of the image, (1, L).
        lambda_val: The threshold.
        question: What was asked for, e.g. `K = 3`.
    """
    classes = set_of(scores, lambda_val)
    order = scores[0].argsort(descending=True, stable=True).tolist()
    below = [j for j in order if j not in classes][:RUNNERS_UP]
    values = scores[0].tolist()
    if config_score(config) == "logit":  # no fixed range, so that of the rows
        low, high = min(values[j] for j in (*classes, *below)), max(values[order[0]], lambda_val)
        low = min(low, lambda_val)
    else:
        low, high = 0.0, 1.0

    def place(value: float) -> float:
        return 100 * (value - low) / ((high - low) or 1)

    def row(j: int) -> str:
        label, bar = html.escape(str(config.id2label[j])), place(values[j])
        track = f'<div class="track"><div class="bar" style="width:{bar:.2f}%"></div>'
        track += f'<div class="mark" style="left:{place(lambda_val):.2f}%"></div></div>'
        score = "< 0.001" if 0 <= values[j] < 0.001 and high == 1 else f"{values[j]:.3f}"
        return (
            f'<tr data-class="{j}"><th scope="row">{label}</th><td aria-hidden="true">{track}</td>'
            f'<td class="number">{score}</td></tr>'
        )

    empty = values[classes[0]] < lambda_val
    note = " No class reaches it; the best one is shown all the same." if empty else ""
    text = [
        f'<div class="avgk"><p role="status"><span class="count">{count(classes)}</span> for {question}</p>',
        '<div class="scroll" tabindex="0" role="region" aria-label="Predicted set"><table class="set">',
        '<colgroup><col style="width:38%"><col><col style="width:5rem"></colgroup>',
        '<thead><tr><th scope="col">class</th><td></td><th scope="col" class="number">score</th></tr></thead>',
        f'<tbody class="in">{"".join(map(row, classes))}</tbody>',
        f'<tbody class="below" aria-label="Not in the set">{"".join(map(row, below))}</tbody></table></div>',
        f'<p class="quiet"><span class="key"></span>threshold {lambda_val:.4g}: what reaches it is in the set,'
        f" what is grey is not.{note}</p></div>",
    ]
    return "".join(text)


def growth_html(config: Any, rows: Sequence[tuple[str, Tensor, float]], now: str, first: str) -> str:
    """How the set of one image grows: for every question the size, and the classes that join.

    Args:
        config: The model's config.
        rows: Name of the question, scores (1, L) of the head that answers it, and its threshold; smallest sets first.
        now: The name of the question that is asked.
        first: Heading of the names.
    """
    sets = [set_of(scores, lambda_val) for _, scores, lambda_val in rows]
    most = max(map(len, sets))
    before: list[int] = []
    body = []
    for (name, _, _), classes in zip(rows, sets, strict=True):
        joined = [html.escape(str(config.id2label[j])) for j in classes if j not in before]
        names = ", ".join(joined[:NAMES]) + f", and {len(joined) - NAMES} more" * (len(joined) > NAMES)
        if any(j not in classes for j in before):  # another head answers
            names += " (another head answers here, so others leave)"
        before = classes
        bar = f'<div class="track"><div class="bar" style="width:{100 * len(classes) / most:.1f}%"></div></div>'
        current = ' class="now" aria-current="true"' if name == now else ""
        body.append(
            f'<tr{current}><th scope="row">{name}</th><td class="number">{len(classes)}</td>'
            f'<td aria-hidden="true">{bar}</td><td>{names or "–"}</td></tr>'
        )
    head = f'<th scope="col">{first}</th><th scope="col" class="number">classes</th><td></td><th scope="col">join</th>'
    columns = '<colgroup><col style="width:5rem"><col style="width:4.5rem"><col style="width:20%"><col></colgroup>'
    return (
        '<div class="avgk"><h2>How the set of this image grows</h2><div class="scroll" tabindex="0" role="region"'
        f' aria-label="Growth of the set"><table class="growth">{columns}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></div>"
    )


def answer(config: Any, scores: dict[str, Tensor], ask: str, k: float, coverage: str | None) -> tuple[str, str]:
    """The set and its growth as HTML.

    Args:
        config: The model's config.
        scores: As `image_scores` gives them.
        ask: `BY_SIZE` or `BY_COVERAGE`.
        k: Average set size.
        coverage: A key of `coverage_thresholds`.
    """
    if ask == BY_COVERAGE:
        own = scores[stored_head(config)]
        recorded = sorted(coverage_thresholds(config).items(), key=lambda item: float(item[0]))
        rows = [(_percent(level), own, lambda_val) for level, lambda_val in recorded]
        now, question = _percent(coverage), f"{_percent(coverage)} coverage"
        return set_html(config, own, dict(recorded)[coverage], question), growth_html(config, rows, now, "coverage")
    ks = sorted({*recorded_ks(config), k})
    rows = [(k_key(each), scores[stored_head(config, each)], stored_threshold(config, each)) for each in ks]
    own = scores[stored_head(config, k)]
    shown = set_html(config, own, stored_threshold(config, k), f"K = {k_key(k)}")
    return shown, growth_html(config, rows, k_key(k), "K")


def _percent(level: str) -> str:
    return f"{100 * float(level):g}%"


def _message(text: str, role: str) -> str:
    return f'<div class="avgk"><p role="{role}" class="{role}">{html.escape(text)}</p></div>'


def _step(ks: Sequence[float]) -> float:
    """The widest step of a slider that meets every recorded K; K between them is interpolated."""
    for step in (1, 0.5, 0.25, 0.1, 0.05):
        if all(abs((k - ks[0]) / step - round((k - ks[0]) / step)) < 1e-6 for k in ks):
            return step
    return 0.01


def example_images(
    model: PreTrainedModel, folder: str | Path | None = None, drawn: str | Path | None = None
) -> list[tuple[Path, int]]:
    """Example images with the sizes of their sets at the model's own K, from clear to hopeless.

    Args:
        model: A calibrated model.
        folder: Images to choose from; None for glyphs, if the model's classes are those, otherwise for no examples.
        drawn: Folder for the glyphs.
    """
    if folder is not None:
        suffixes = set(Image.registered_extensions())
        found = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in suffixes and path.is_file())
        if not found:
            reason = "holds no images" if Path(folder).is_dir() else "is no folder"
            raise ValueError(f"--examples {folder} {reason}; give a folder with PNG or JPEG files.")
    elif list(model.config.id2label.values()) == [class_name(character) for character in CHARACTERS]:
        rng = np.random.default_rng(0)
        found = []
        for number, character in enumerate(rng.choice(list(CHARACTERS), LOOKED_AT)):
            found.append(Path(drawn, f"glyph_{number:02d}.png"))
            draw(character, rng).save(found[-1])
    else:
        return []
    transform, lambda_val = transform_for(model), stored_threshold(model.config)
    head = stored_head(model.config)
    sized = []
    for path in _evenly(found, LOOKED_AT):
        scores = image_scores(model, transform, path)[head]
        sized.append((len(set_of(scores, lambda_val)), -scores.max().item(), path))
    return [(path, size) for size, _, path in _evenly(sorted(sized), EXAMPLES)]


def _evenly(items: list, most: int) -> list:
    """At most so many of the items, the first and the last among them."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)]


def build_page(model: PreTrainedModel, name: str, examples: Sequence[tuple[Path, int]] = ()) -> gr.Blocks:
    """The page of one model.

    Args:
        model: A calibrated classifier; another one is refused.
        name: What to call it.
        examples: As `example_images` gives them.
    """
    config = model.config
    stored_threshold(config)  # refuses a model without
    ks, levels, transform = recorded_ks(config), coverage_thresholds(config), transform_for(model)
    own_k = float(getattr(config, "k", ks[0]))

    def read(path: str | None) -> dict[str, Tensor] | str | None:
        if path is None:
            return None
        try:
            return image_scores(model, transform, path)
        except (ValueError, OSError) as error:
            return str(error).replace(path, Path(path).name)  # where the server keeps it is nobody's business

    def show(found: dict[str, Tensor] | str | None, ask: str, k: float, coverage: str | None) -> tuple[str, str]:
        if found is None:
            return _message(HINT, "status"), ""
        if isinstance(found, str):
            return _message(found, "alert"), ""
        return answer(config, found, ask, k, coverage)

    record = getattr(config, "calibration", None) or {}
    source = f" of {record['dataset']}" if record.get("dataset") else ""
    thresholds = f"Its thresholds come from {record['num_examples']:,} images{source}." * ("num_examples" in record)
    with gr.Blocks(title=f"{name}: sets of classes", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(
            f"# {html.escape(name)}\nAs many of {config.num_labels:,} classes as the image needs, K on average over"
            f" many images: a clear image gets fewer, an ambiguous one more. {html.escape(thresholds)}"
        )
        with gr.Row():
            with gr.Column(scale=4, min_width=300):
                image = gr.Image(
                    type="filepath",
                    image_mode=None,
                    label="Image",
                    sources=["upload", "clipboard"],
                    height=260,
                    buttons=[],
                    elem_id="avgk-image",
                    elem_classes=["small"] if getattr(transform, "mode", "") == "L" else [],
                )
                # Gradio would open the file, and answer a broken one with words of its own
                image.preprocess = lambda payload: None if payload is None else payload.path
                ask = gr.Radio(
                    [BY_SIZE, BY_COVERAGE], value=BY_SIZE, label="Ask by", visible=bool(levels), elem_id="avgk-ask"
                )
                slider = gr.Slider(
                    ks[0],
                    ks[-1] if len(ks) > 1 else ks[0] + 1,
                    own_k,
                    step=_step(ks),
                    label="K, classes on average",
                    info=f"calibrated for K = {', '.join(map(k_key, ks))}",
                    interactive=len(ks) > 1,
                    buttons=[],
                    elem_id="avgk-k",
                )
                coverage = gr.Radio(
                    [(_percent(level), level) for level in sorted(levels, key=float)],
                    value=min(levels, key=float, default=None),
                    label="Coverage, the share of images whose set holds the true class",
                    visible=False,
                    elem_id="avgk-coverage",
                )
                if examples:
                    gr.HTML(
                        '<div class="avgk"><h2>Examples, from clear to hopeless</h2><p class="quiet">with the size of'
                        f" their sets for K = {k_key(own_k)}</p></div>"
                    )
                    gallery = gr.Gallery(
                        [(str(path), count(size)) for path, size in examples],
                        label="Examples, from clear to hopeless",
                        show_label=False,
                        columns=4,
                        height="auto",
                        allow_preview=False,
                        interactive=False,
                        buttons=[],
                        elem_id="avgk-examples",
                    )
            with gr.Column(scale=6, min_width=360):
                predicted = gr.HTML(_message(HINT, "status"), elem_id="avgk-set", container=True, padding=True)
                growth = gr.HTML("", elem_id="avgk-growth", container=True, padding=True)
        found = gr.State(None)
        shown = {"fn": show, "inputs": [found, ask, slider, coverage], "outputs": [predicted, growth]}
        # the last of several quick changes must not be dropped because the one before it is still being answered
        quiet = {"show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last"}
        image.change(read, image, found, **quiet).then(**shown, **quiet)
        for control in (slider, coverage):
            control.change(**shown, **quiet)
        ask.change(
            lambda by: (gr.update(visible=by == BY_SIZE), gr.update(visible=by == BY_COVERAGE)),
            ask,
            [slider, coverage],
            **quiet,
        ).then(**shown, **quiet)
        if examples:
            paths = [str(path) for path, _ in examples]

            def choose(chosen: gr.SelectData) -> str:
                return paths[chosen.index]

            gallery.select(choose, None, image, **quiet)
    return page


def launch(page: gr.Blocks, examples: Sequence[tuple[Path, int]] = (), **options: Any) -> None:
    """Start the page's server without anything that other machines would have to provide.

    Args:
        page: What `build_page` gave.
        examples: The examples it was built with; the only files that it may serve besides those that are uploaded.
        options: As in `gr.Blocks.launch`.
    """
    theme = gr.themes.Default(
        primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    for shade in ("", "_dark"):  # Gradio's grey is too faint to be read by everybody
        grey = f"*neutral_{300 if shade else 600}"
        theme.set(**{f"{name}{shade}": grey for name in ("body_text_color_subdued", "block_info_text_color")})
    # Gradio asks its own server whether it is there, and a proxy could not tell
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, [known, "127.0.0.1", "localhost"]))
    page.queue(default_concurrency_limit=4).launch(
        theme=theme,
        css=CSS,
        footer_links=[],
        share=False,
        ssr_mode=False,
        quiet=True,
        max_file_size="50mb",
        allowed_paths=[str(path) for path, _ in examples],
        **options,
    )


def serve(name: str, port: int = 7860, examples: str | None = None) -> None:
    """Serve the page of a model on this machine until it is interrupted.

    Args:
        name: Folder or Hub id of a calibrated model.
        port: Where to listen on 127.0.0.1.
        examples: Folder of example images.
    """
    if not 0 < port < 65536:
        raise ValueError(f"--port {port} must lie in 1 to 65535, e.g. 7860.")
    with socket.socket() as probe:  # found before the model is loaded
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise OSError(f"--port {port} cannot be used ({error.strerror}); name another, e.g. {port + 1}.") from None
    model = load_classifier(name)
    stored_threshold(model.config)
    with tempfile.TemporaryDirectory(prefix="avgk-app-") as drawn:
        chosen = example_images(model, examples, drawn)
        page = build_page(model, _title(name), chosen)
        launch(page, chosen, server_name="127.0.0.1", server_port=port, prevent_thread_lock=True)
        print(f"http://127.0.0.1:{port} shows {name}; Ctrl-C ends it.", flush=True)
        try:
            while True:
                time.sleep(3600)
        finally:
            page.close(verbose=False)


def _title(name: str) -> str:
    return Path(name).resolve().name if Path(name).is_dir() else name


SPACE_APP = '''\
"""The page of {title}, written by `avgk app`; README.md says what this folder is."""

from pathlib import Path

from avgk_hf.app import build_page, example_images, launch
from avgk_hf.calibrate import load_classifier

here = Path(__file__).parent
model = load_classifier({model})
examples = example_images(model, {examples})
launch(build_page(model, {title!r}, examples), examples)
'''
SPACE_CARD = """\
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
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--space {folder} exists and is not an empty folder; name a new one.")
    model = load_classifier(name)
    stored_threshold(model.config)
    local, title = Path(name).is_dir(), _title(name)
    with tempfile.TemporaryDirectory() as drawn:
        chosen = example_images(model, examples, drawn)  # before anything is written, because it may be refused
        folder.mkdir(parents=True, exist_ok=True)
        if chosen:
            (folder / "examples").mkdir()
        for number, (path, _) in enumerate(chosen):
            shutil.copyfile(path, folder / "examples" / f"{number}{path.suffix.lower()}")
    if local:
        (folder / "model").mkdir()
        for path in Path(name).iterdir():
            kept = any(fnmatch(path.name, pattern) for pattern in PUSHED)
            if path.is_file() and kept and not any(fnmatch(path.name, pattern) for pattern in NOT_PUSHED):
                shutil.copyfile(path, folder / "model" / path.name)
    here = Path(__file__).parent
    shutil.copytree(here, folder / here.name, ignore=shutil.ignore_patterns("__pycache__", "recipes"))
    needs = [text for text in importlib.metadata.requires("avgk_hf") or [] if "extra ==" not in text]
    (folder / "requirements.txt").write_text("\n".join([*needs, f"gradio=={gr.__version__}"]) + "\n")
    code = SPACE_APP.format(
        title=title,
        model='str(here / "model")' if local else repr(name),
        examples='here / "examples"' if chosen else "None",
    )
    (folder / "app.py").write_text(code, encoding="utf-8")
    front = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=gr.__version__,
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        app_file="app.py",
        models=None if local else [name],
        tags=["average-k", "image-classification"],
        short_description="As many classes as the image needs, K on average",
    )
    where = "`model/` holds the model" if local else f"the model is [{name}](https://huggingface.co/{name})"
    card = SPACE_CARD.format(front=front.to_yaml(), title=title, where=where)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return HOW_TO_PUSH.format(folder=str(folder))
