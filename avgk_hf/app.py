"""The page of `avgk app`: drop an image, choose K, see the set and how it grows.

    avgk app MODEL

Scores and sets come from the parts that `avgk predict` calls. What one visitor does stays in his session: the scores
of the image live in a `gr.State`. The page needs nothing from other machines; a model of the Hub does, to be loaded.
What it refuses to visitors is in `guard`; what it shows of a model's records is text, never Markdown or HTML.
"""

import atexit
import functools
import html
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from .classifiers import load_classifier, model_scores, transform_for
from .conformal import answer, check_request, recorded_levels
from .data import image_files
from .data.glyphs import CHARACTERS, class_name, draw
from .pipeline import config_score
from .sets import calibration_record, k_key, own_k, ranked_sets, stored_head, stored_threshold

try:
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from .guard import LOOPBACK, MOST_UPLOADED, Guard, forget_upload, is_local, is_served
except ImportError as error:
    raise ImportError("the page is a Gradio app: `pip install 'avgk_hf[app]'`.") from error

logger = logging.getLogger(__name__)

EXAMPLES, LOOKED_AT = 8, 64  # example images shown, and those they are chosen from
ROWS = 200  # classes of a set that are shown; thousands would be megabytes for every step of the slider
MOST_PIXELS = 25_000_000  # of an image; decoding one takes up to 16 bytes for each
WAITING, SESSIONS = 64, 1000  # events in the queue, and visitors whose scores are kept
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
.avgk h1 { margin: 0 0 .4rem; font-size: 1.6rem; font-weight: 650; overflow-wrap: anywhere; }
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
.avgk th, .avgk td { overflow-wrap: anywhere; }
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
GONE = "The server has no such image, or not any more; drop it again."


def recorded_ks(config: Any) -> list[float]:
    """The average set sizes that a model is calibrated for, ascending."""
    return sorted(float(key) for key in config.thresholds)


def image_scores(model: PreTrainedModel, pixels: Tensor) -> dict[str, Tensor]:
    """The scores (1, L) of an image (C, H, W), of every head that answers for some K: one, unless `head="auto"`."""
    heads = {stored_head(model.config, k): k for k in recorded_ks(model.config)}
    return {head: model_scores(model, pixels[None], k) for head, k in heads.items()}


def head_of(config: Any, scores: dict[str, Tensor], k: float | None = None, **question: float) -> Tensor:
    """The scores (1, L) of the head that answers a question, of those that `image_scores` gives."""
    return scores[stored_head(config, k)]


def set_of(config: Any, scores: dict[str, Tensor], **question: float) -> list[int]:
    """The classes of one image, best first; at least one, as in the pipeline.

    Args:
        config: The model's config.
        scores: As `image_scores` gives them.
        question: As in `conformal.answer`, e.g. `k=3`; default: the model's own K.
    """
    own = head_of(config, scores, **question)
    return ranked_sets(own, answer(own, config, min_size=1, **question))[0]


def count(number: int) -> str:
    """`1 class`, `3 classes`."""
    return f"{number} class{'es' * (number != 1)}"


def set_html(config: Any, scores: dict[str, Tensor], **question: float) -> str:
    """The set of one image as a table with bars, and the best classes below the threshold in grey.

    Args:
        config: The model's config.
        scores: As `image_scores` gives them.
        question: `k` or `coverage`.
    """
    own, classes = head_of(config, scores, **question), set_of(config, scores, **question)
    lambda_val = check_request(config, **question)[1]
    order = own[0].argsort(descending=True, stable=True).tolist()
    inside, shown = set(classes), classes[:ROWS]
    below = list(islice((j for j in order if j not in inside), RUNNERS_UP))
    values = own[0].tolist()
    if config_score(config) == "logit":  # no fixed range, so that of the rows
        low, high = min(values[j] for j in (*shown, *below)), max(values[order[0]], lambda_val)
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

    empty = not answer(own, config, **question).any()
    note = " No class reaches it; the best one is shown all the same." if empty else ""
    asked = f"K = {_name(**question)}" if "k" in question else f"{_name(**question)} coverage"
    more = f'<tr><td colspan="3">and {len(classes) - ROWS} more</td></tr>' * (len(classes) > ROWS)
    text = [
        f'<div class="avgk"><p role="status"><span class="count">{count(len(classes))}</span> for {asked}</p>',
        '<div class="scroll" tabindex="0" role="region" aria-label="Predicted set"><table class="set">',
        '<colgroup><col style="width:38%"><col><col style="width:5rem"></colgroup>',
        '<thead><tr><th scope="col">class</th><td></td><th scope="col" class="number">score</th></tr></thead>',
        f'<tbody class="in">{"".join(map(row, shown))}</tbody><tbody class="more">{more}</tbody>',
        f'<tbody class="below" aria-label="Not in the set">{"".join(map(row, below))}</tbody></table></div>',
        f'<p class="quiet"><span class="key"></span>threshold {lambda_val:.4g}: what reaches it is in the set,'
        f" what is grey is not.{note}</p></div>",
    ]
    return "".join(text)


def growth_html(config: Any, scores: dict[str, Tensor], **question: float) -> str:
    """How the set of one image grows: for every recorded K, or coverage, the size, and the classes that join.

    Args:
        config: The model's config.
        scores: As `image_scores` gives them.
        question: `k` or `coverage`; the one that is marked.
    """
    ((asked, value),) = question.items()
    known = recorded_levels(config) if asked == "coverage" else recorded_ks(config)
    steps = sorted({*known, value})  # smallest sets first
    sets = [set_of(config, scores, **{asked: step}) for step in steps]
    most = max(map(len, sets))
    before: set[int] = set()
    body = []
    for step, classes in zip(steps, sets, strict=True):
        joined = [j for j in classes if j not in before]
        names = ", ".join(html.escape(str(config.id2label[j])) for j in joined[:NAMES])
        names += f", and {len(joined) - NAMES} more" * (len(joined) > NAMES)
        if not before.issubset(classes):  # another head answers
            names += " (another head answers here, so others leave)"
        before = set(classes)
        bar = f'<div class="track"><div class="bar" style="width:{100 * len(classes) / most:.1f}%"></div></div>'
        current = ' class="now" aria-current="true"' if step == value else ""
        body.append(
            f'<tr{current}><th scope="row">{_name(**{asked: step})}</th><td class="number">{len(classes)}</td>'
            f'<td aria-hidden="true">{bar}</td><td>{names or "–"}</td></tr>'
        )
    first = "coverage" if asked == "coverage" else "K"
    head = f'<th scope="col">{first}</th><th scope="col" class="number">classes</th><td></td><th scope="col">join</th>'
    columns = '<colgroup><col style="width:5rem"><col style="width:4.5rem"><col style="width:20%"><col></colgroup>'
    return (
        '<div class="avgk"><h2>How the set of this image grows</h2><div class="scroll" tabindex="0" role="region"'
        f' aria-label="Growth of the set"><table class="growth">{columns}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></div>"
    )


def answer_html(config: Any, scores: dict[str, Tensor], **question: float) -> tuple[str, str]:
    """The set and its growth; the arguments are those of `set_html`."""
    return set_html(config, scores, **question), growth_html(config, scores, **question)


def _name(k: float = 0, coverage: float | None = None) -> str:
    """A question as the page spells it: `3`, or `90%`."""
    return k_key(k) if coverage is None else f"{100 * coverage:g}%"


def _message(text: str, role: str) -> str:
    return f'<div class="avgk"><p role="{role}" class="{role}">{html.escape(text)}</p></div>'


def _step(ks: Sequence[float]) -> float:
    """The widest step of a slider that meets every recorded K; K between them is interpolated."""
    for step in (1, 0.5, 0.25, 0.1, 0.05):
        if all(abs((k - ks[0]) / step - round((k - ks[0]) / step)) < 1e-6 for k in ks):
            return step
    return 0.01


def example_images(model: PreTrainedModel, folder: str | Path | None) -> list[tuple[Path, int]]:
    """Example images with the sizes of their sets at the model's own K, from clear to hopeless.

    Args:
        model: A calibrated model.
        folder: Images to choose from; those that cannot be read are left out. None for no examples.
    """
    if folder is None:
        return []
    found = image_files(folder)
    if not found:
        reason = "holds no images" if Path(folder).is_dir() else "is no folder"
        raise ValueError(f"--examples {folder} {reason}; give a folder with PNG or JPEG files.")
    transform, sized, faults = transform_for(model), [], []
    for path in dict.fromkeys([*_evenly(found, LOOKED_AT), *found]):  # the others where some cannot be read
        try:
            pixels = transform.image(path)
        except (ValueError, OSError) as error:
            faults.append(str(error))
            continue
        scores = image_scores(model, pixels)
        sized.append((len(set_of(model.config, scores)), -head_of(model.config, scores).max().item(), path))
        if len(sized) == LOOKED_AT:
            break
    if not sized:
        raise ValueError(f"--examples {folder}: none of the {len(faults)} images can be read, e.g. {faults[0]}")
    if faults:
        number = f"{len(faults)} image{'s' * (len(faults) > 1)}"
        logger.warning(f"--examples {folder}: left out {number} that cannot be read, e.g. {faults[0]}")
    return [(path, size) for size, _, path in _evenly(sorted(sized), EXAMPLES)]


@contextmanager
def chosen_examples(model: PreTrainedModel, folder: str | None) -> Iterator[list[tuple[Path, int]]]:
    """`example_images` of a folder; without one, of glyphs that are drawn, if the model's classes are those."""
    with tempfile.TemporaryDirectory(prefix="avgk-app-") as drawn:
        if folder is None and list(model.config.id2label.values()) == [class_name(each) for each in CHARACTERS]:
            rng = np.random.default_rng(0)
            for number, character in enumerate(rng.choice(list(CHARACTERS), LOOKED_AT)):
                draw(character, rng).save(Path(drawn, f"glyph_{number:02d}.png"))
            folder = drawn
        yield example_images(model, folder)


def _evenly(items: list, most: int) -> list:
    """At most so many of the items, the first and the last among them."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)]


@functools.cache
def upload_folder() -> Path:
    """The folder where Gradio keeps uploads: of this process alone, closed to others, and removed at its end."""
    above = os.environ.get("GRADIO_TEMP_DIR")
    if above:
        Path(above).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="avgk-uploads-", dir=above)).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    return folder


def build_page(model: PreTrainedModel, name: str, examples: Sequence[tuple[Path, int]] = ()) -> gr.Blocks:
    """The page of one model.

    Args:
        model: A calibrated classifier; another one is refused.
        name: What to call it.
        examples: As `example_images` gives them.
    """
    config = model.config
    stored_threshold(config)  # refuses a model without
    upload_folder()  # asked for by every component
    ks, levels, transform = recorded_ks(config), recorded_levels(config), transform_for(model)
    own = float(own_k(config))
    looked_at: dict[str, str] = {}  # by session, the upload that it shows

    def leave(session: str, path: str | None = None) -> None:
        before = looked_at.pop(session, None)
        if path is not None:
            looked_at[session] = path
        if before not in looked_at.values():
            forget_upload(page, before)

    def read(path: str | None, request: gr.Request) -> dict[str, Tensor] | str | None:
        leave(request.session_hash, path)
        if len(looked_at) > SESSIONS:
            leave(next(iter(looked_at)))
        if path is None:
            return None
        try:
            return image_scores(model, transform.image(path, most_pixels=MOST_PIXELS))
        except (ValueError, OSError) as error:
            return str(error).replace(path, Path(path).name)  # where the server keeps it is nobody's business

    def closed(request: gr.Request) -> None:
        leave(request.session_hash)

    def known(path: str | None) -> str | None:
        if path is not None and not is_served(page, path):
            raise gr.Error(GONE, print_exception=False)
        return path

    async def moved(path: str | None) -> str | None:
        return known(path)

    def show(found: dict[str, Tensor] | str | None, ask: str, k: float, coverage: float | None) -> tuple[str, str]:
        if found is None:
            return _message(HINT, "status"), ""
        if isinstance(found, str):
            return _message(found, "alert"), ""
        return answer_html(config, found, **({"coverage": coverage} if ask == BY_COVERAGE else {"k": k}))

    record, thresholds = calibration_record(config), ""
    if isinstance(record.get("num_examples"), int):
        source = f" of {record['dataset']}" if record.get("dataset") else ""
        thresholds = f"Its thresholds come from {record['num_examples']:,} images{source}."
    with gr.Blocks(title=f"{name}: sets of classes", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.HTML(
            f'<div class="avgk"><h1>{html.escape(name)}</h1><p>As many of {config.num_labels:,} classes as the image'
            " needs, K on average over many images: a clear image gets fewer, an ambiguous one more."
            f" {html.escape(thresholds)}</p></div>"
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
                # Gradio would open the file, and answer a broken one with words of its own; before that it would
                # fetch what a path names, be it an address on the web
                image.preprocess = lambda payload: known(None if payload is None else payload.path)
                image.async_move_resource_to_block_cache = moved
                ask = gr.Radio(
                    [BY_SIZE, BY_COVERAGE], value=BY_SIZE, label="Ask by", visible=bool(levels), elem_id="avgk-ask"
                )
                if len(ks) > 1:
                    size = by_size = gr.Slider(
                        ks[0],
                        ks[-1],
                        own,
                        step=_step([*ks, own]),
                        label="K, classes on average",
                        info=f"calibrated for K = {', '.join(map(k_key, ks))}",
                        interactive=True,
                        buttons=[],
                        elem_id="avgk-k",
                    )
                else:
                    size = gr.State(own)
                    only = f"K = {k_key(own)} classes on average: the model is calibrated for no other."
                    by_size = gr.HTML(_message(only, "note"), elem_id="avgk-k")
                coverage = gr.Radio(
                    [(_name(coverage=level), level) for level in levels],
                    value=levels[0] if levels else None,
                    label="Coverage, the share of images whose set holds the true class",
                    visible=False,
                    elem_id="avgk-coverage",
                )
                if examples:
                    gr.HTML(
                        '<div class="avgk"><h2>Examples, from clear to hopeless</h2><p class="quiet">with the size of'
                        f" their sets for K = {k_key(own)}</p></div>"
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
        shown = {"fn": show, "inputs": [found, ask, size, coverage], "outputs": [predicted, growth]}
        # the last of several quick changes must not be dropped because the one before it is still being answered
        quiet = {"show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last"}
        image.change(read, image, found, concurrency_limit=1, **quiet).then(**shown, **quiet)
        page.unload(closed)
        for control in (size, coverage):
            control.change(**shown, **quiet)
        ask.change(
            lambda by: (gr.update(visible=by == BY_SIZE), gr.update(visible=by == BY_COVERAGE)),
            ask,
            [by_size, coverage],
            **quiet,
        ).then(**shown, **quiet)
        if examples:
            copies = [item["image"]["path"] for item in gallery.value]

            def choose(chosen: gr.SelectData) -> str:
                return copies[chosen.index]

            gallery.select(choose, None, image, **quiet)
    return page


def launch(page: gr.Blocks, **options: Any) -> None:
    """Start the page's server without anything that other machines would have to provide.

    One that listens on this machine only answers to this machine's names: a site that is given its address by a
    forged entry of the domain name system cannot read it through a visitor's browser.

    Args:
        page: What `build_page` gave.
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
    address = options.get("server_name") or os.environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
    local = is_local(address)
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, address] if local else ["*"]),
        Middleware(Guard, page=page, folder=upload_folder(), local=local),
    ]
    page.queue(default_concurrency_limit=4, max_size=WAITING, api_open=False).launch(
        theme=theme,
        css=CSS,
        footer_links=[],
        share=False,
        ssr_mode=False,
        quiet=True,
        max_file_size=MOST_UPLOADED,
        state_session_capacity=SESSIONS,
        app_kwargs={"middleware": middleware},
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
    with chosen_examples(model, examples) as chosen:
        page = build_page(model, title_of(name), chosen)
        launch(page, server_name="127.0.0.1", server_port=port, prevent_thread_lock=True)
        print(f"http://127.0.0.1:{port} shows {name}; Ctrl-C ends it.", flush=True)
        try:
            while True:
                time.sleep(3600)
        finally:
            page.close(verbose=False)


def title_of(name: str) -> str:
    """What to call a model: its folder, or its id on the Hub."""
    return Path(name).resolve().name if Path(name).is_dir() else name
