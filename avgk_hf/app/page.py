"""The page of `avgk app MODEL` as a Gradio app, which needs nothing from other machines.

What one visitor does stays in his session: the scores of the image live in a `gr.State`. What is refused to visitors
is in `guard`.
"""

import atexit
import functools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from torch import Tensor

from ..checks import is_number
from ..sets import k_key
from ..shell import shortened
from .answers import TEMPLATES, Answers, message, question_text, render
from .guard import LOOPBACK, MOST_UPLOADED, Guard, forget_upload, is_local, is_served

MOST_PIXELS = 25_000_000  # of an image; decoding one takes up to 16 bytes for each
WAITING, SESSIONS = 64, 1000  # events in the queue, and visitors whose scores are kept
ASK_BY = BY_SIZE, BY_COVERAGE = "average size", "coverage"
HINT, OR_EXAMPLE = "Choose or drop an image.", "Choose or drop an image, or take one of the examples."
GONE = "The server has no such image, or not any more; drop it again."
# of the page on a phone, after the gallery has scrolled to what was chosen
TO_ANSWER = (
    "() => {setTimeout(() => document.querySelector('#avgk-set').scrollIntoView({block: 'nearest'}), 500); return []}"
)
EXAMPLES = "Examples, from clear to hopeless"
# the last of several quick changes must not be dropped because the one before it is still being answered
QUIET = {"show_progress": "hidden", "api_visibility": "private", "trigger_mode": "always_last"}


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


class _Events:
    """What the page does when a visitor does something."""

    def __init__(self, answers: Answers, page: gr.Blocks, hint: str) -> None:
        self.answers, self.page, self.hint = answers, page, hint
        self.looked_at: dict[str, str] = {}  # by session, the upload that it shows

    def leave(self, session: str, path: str | None = None) -> None:
        before = self.looked_at.pop(session, None)
        if path is not None:
            self.looked_at[session] = path
        if before not in self.looked_at.values():
            forget_upload(self.page, before)

    def closed(self, request: gr.Request) -> None:
        self.leave(request.session_hash)

    def known(self, path: str | None) -> str | None:
        if path is not None and not is_served(self.page, path):
            raise gr.Error(GONE, print_exception=False)
        return path

    async def moved(self, path: str | None) -> str | None:
        return self.known(path)

    def read(self, path: str | None, request: gr.Request) -> dict[str, Tensor] | str | None:
        """The scores of an image, or why there are none."""
        self.leave(request.session_hash, path)
        if len(self.looked_at) > SESSIONS:
            self.leave(next(iter(self.looked_at)))
        if path is None:
            return None
        try:
            return self.answers.scores(self.answers.transform.image(path, most_pixels=MOST_PIXELS))
        except (ValueError, OSError) as error:
            return str(error).replace(path, Path(path).name)  # where the server keeps it is nobody's business

    def read_several(self, paths: list[str] | None) -> list[tuple[str, Any]]:
        """Of each image its name and its scores, or why it has none; the uploads are not kept."""
        found: list[tuple[str, Any]] = []
        for path in (paths or [])[: self.answers.at_once]:
            try:
                scores = self.answers.scores(self.answers.transform.image(path, most_pixels=MOST_PIXELS))
            except (ValueError, OSError) as error:
                scores = str(error).replace(path, Path(path).name)
            found.append((Path(path).name, scores))
        for path in paths or []:
            if path not in self.looked_at.values():
                forget_upload(self.page, path)
        return [*found, *((Path(path).name, None) for path in (paths or [])[self.answers.at_once :])]

    def show_several(
        self, images: list[tuple[str, Any]] | None, ask: str, k: float, coverage: float | None, balance: float = 0.0
    ) -> str:
        """The table of what `read_several` gave."""
        looked_at = [each for each in images or () if each[1] is not None]
        left = [name for name, scores in images or () if scores is None]
        return (
            self.answers.table_html(looked_at, left, **self.question(ask, k, coverage, balance)) if looked_at else ""
        )

    def ask_by(self, by: str) -> list[dict[str, Any]]:
        """Which control is seen."""
        return [gr.update(visible=by == each) for each in ASK_BY]

    def show(
        self, found: dict[str, Tensor] | str | None, ask: str, k: float, coverage: float | None, balance: float = 0.0
    ) -> tuple[str, str]:
        """The set and its growth, from what `read` gave."""
        if found is None:
            return message(self.hint, "status"), ""
        if isinstance(found, str):
            return message(found, "alert"), ""
        return self.answers.html(found, **self.question(ask, k, coverage, balance))

    def nearest(self, balance: float) -> float:
        """The recorded balance that answers for one between them."""
        return min(self.answers.balances, key=lambda each: abs(each - balance))

    def question(self, ask: str, k: float, coverage: float | None, balance: float) -> dict[str, float]:
        """What the controls ask."""
        question = {"coverage": coverage} if ask == BY_COVERAGE else {"k": k}
        if len(self.answers.balances) > 1:  # a slider may stop between those that are recorded
            question["balance"] = self.nearest(balance)
        return question


def _drawn_large(answers: Answers) -> list[str]:
    """How small grey images are shown: by their pixels."""
    return ["small"] if answers.transform.mode == "L" else []


def _image(events: _Events) -> gr.Image:
    """Where an image is dropped."""
    image = gr.Image(
        type="filepath",
        image_mode=None,
        label="Image",
        sources=["upload", "clipboard"],
        height=260,
        buttons=[],
        elem_id="avgk-image",
        elem_classes=_drawn_large(events.answers),
    )
    # Gradio would open the file, and answer a broken one with words of its own; before that it would fetch what a
    # path names, be it an address on the web
    image.preprocess = lambda payload: events.known(None if payload is None else payload.path)
    image.async_move_resource_to_block_cache = events.moved
    return image


def _several(events: _Events) -> gr.File:
    """Where several images are dropped at once."""
    files = gr.File(
        file_count="multiple",
        label=f"Several images at once, {events.answers.at_once} at most",
        height=140,
        buttons=[],
        elem_id="avgk-files",
    )
    # as for one image: nothing is opened or fetched but what was uploaded
    files.preprocess = lambda payload: [events.known(each.path) for each in payload or ()]
    files.async_move_resource_to_block_cache = events.moved
    return files


def _bounded(slider: gr.Slider) -> gr.Slider:
    """A slider that takes its nearest end for a number beyond it, which Gradio would answer with errors."""
    first, low, high = slider.value, slider.minimum, slider.maximum
    slider.preprocess = lambda payload: min(max(payload if is_number(payload) else first, low), high)
    return slider


def _size(answers: Answers) -> tuple[gr.Slider | gr.State, gr.Slider | gr.HTML]:
    """What holds K, and what is seen of it: a slider, or text where there is nothing to choose."""
    k, ks = answers.k, answers.ks
    if len(ks) == 1:
        only = f"K = {k_key(k)} {answers.many} on average: the model is calibrated for no other."
        return gr.State(k), gr.HTML(message(only, "note"), elem_id="avgk-k")

    slider = gr.Slider(
        ks[0],
        ks[-1],
        k,
        step=math.gcd(100, *(round(100 * (other - ks[0])) for other in (*ks, k))) / 100,  # meets every recorded K
        label=f"K, {answers.many} on average",
        info=f"calibrated for K = {', '.join(map(k_key, ks))}",
        interactive=True,
        buttons=[],
        elem_id="avgk-k",
    )
    return _bounded(slider), slider


def _balance(answers: Answers) -> gr.Slider | gr.State:
    """What holds the balance: a slider, where there is something to choose."""
    if len(answers.balances) == 1:
        return gr.State(answers.balance)
    slider = gr.Slider(
        answers.balances[0],
        answers.balances[-1],
        answers.balance,
        step=math.gcd(*(round(100 * each) for each in answers.balances)) / 100,
        label=f"Favour rare {answers.many} (balance)",
        info=f"0: every image counts alike, 1: every {answers.one} does; recorded"
        f" {', '.join(f'{b:g}' for b in answers.balances)}",
        interactive=True,
        buttons=[],
        elem_id="avgk-balance",
    )
    return _bounded(slider)


def _show_examples(examples: Sequence[tuple[Path, int]], answers: Answers, image: gr.Image) -> None:
    """The examples with the sizes of their sets and true names, or files; the one that is chosen becomes the image."""
    gr.HTML(render("examples.html", title=EXAMPLES, k=k_key(answers.k)))
    shown = []
    for path, size in examples:
        name = answers.true_name(path)
        shown.append((str(path), f"{answers.count(size)}; {f'true: {name}' if name else shortened(path.name, 40)}"))
    gallery = gr.Gallery(
        shown,
        label=EXAMPLES,
        show_label=False,
        columns=4,
        height="auto",
        allow_preview=False,
        interactive=False,
        buttons=[],
        elem_id="avgk-examples",
        elem_classes=_drawn_large(answers),
    )

    def choose(chosen: gr.SelectData) -> str:
        return gallery.value[chosen.index]["image"]["path"]  # the copy that is served

    gallery.select(choose, None, image, js=TO_ANSWER, **QUIET)


def build_page(answers: Answers, name: str, examples: Sequence[tuple[Path, int]] = ()) -> gr.Blocks:
    """The page of one model.

    Args:
        answers: Of the model.
        name: What to call it.
        examples: As `example_images` gives them.
    """
    upload_folder()  # asked for by every component
    levels = [(question_text(coverage=level), level) for level in answers.levels]
    with gr.Blocks(title=f"{name}: sets of {answers.many}", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        events = _Events(answers, page, OR_EXAMPLE if examples else HINT)
        about = {"num_labels": answers.config.num_labels, "source": answers.source, "many": answers.many}
        gr.HTML(render("heading.html", name=name, **about))
        with gr.Row():
            with gr.Column(scale=4, min_width=300):
                image = _image(events)
                ask = gr.Radio(ASK_BY, value=BY_SIZE, label="Ask by", visible=bool(levels), elem_id="avgk-ask")
                size, by_size = _size(answers)
                coverage = gr.Radio(
                    levels,
                    value=answers.levels[0] if levels else None,
                    label=f"Coverage, the share of images whose set holds the true {answers.one}",
                    visible=False,
                    elem_id="avgk-coverage",
                )
                balance = _balance(answers)
            with gr.Column(scale=6, min_width=360):
                predicted = gr.HTML(message(events.hint, "status"), elem_id="avgk-set", container=True, padding=True)
                growth = gr.HTML("", elem_id="avgk-growth", container=True, padding=True)
                if examples:  # below the answer, on a phone too
                    _show_examples(examples, answers, image)
        files, table = _several(events), gr.HTML("", elem_id="avgk-several", container=True, padding=True)
        found, several = gr.State(None), gr.State(None)
        asked = [ask, size, coverage, balance]
        shown = {"fn": events.show, "inputs": [found, *asked], "outputs": [predicted, growth], **QUIET}
        tabled = {"fn": events.show_several, "inputs": [several, *asked], "outputs": table, **QUIET}
        image.change(events.read, image, found, concurrency_limit=1, **QUIET).then(**shown)
        files.upload(events.read_several, files, several, concurrency_limit=1, **QUIET).then(**tabled)
        files.clear(lambda: (None, ""), None, [several, table], **QUIET)
        page.unload(events.closed)
        if isinstance(balance, gr.Slider):  # a number that is typed may lie between
            balance.change(events.nearest, balance, balance, **QUIET)
        for control in (size, coverage, balance):
            control.change(**shown)
            control.change(**tabled)
        ask.change(events.ask_by, ask, [by_size, coverage], **QUIET).then(**shown).then(**tabled)
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
    for shade, number in (("", 600), ("_dark", 300)):  # Gradio's grey is too faint to be read by everybody
        greys = (f"body_text_color_subdued{shade}", f"block_info_text_color{shade}")
        theme.set(**dict.fromkeys(greys, f"*neutral_{number}"))
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
        css_paths=TEMPLATES / "page.css",
        footer_links=[],
        share=False,
        ssr_mode=False,
        quiet=True,
        i18n=gr.I18n(en={"common.upload": "Upload"}),  # a name that Gradio asks for and does not have
        max_file_size=MOST_UPLOADED,
        state_session_capacity=SESSIONS,
        app_kwargs={"middleware": middleware},
        **options,
    )


def serve(answers: Answers, name: str, port: int, examples: Sequence[tuple[Path, int]] = ()) -> None:
    """Serve the page of a model on this machine until it is interrupted.

    Args:
        answers: Of the model.
        name: What to call it.
        port: Where to listen on 127.0.0.1.
        examples: As `example_images` gives them.
    """
    page = build_page(answers, name, examples)
    launch(page, server_name="127.0.0.1", server_port=port, prevent_thread_lock=True)
    print(f"http://127.0.0.1:{port} shows {name}; open it in a browser. Ctrl-C ends it.", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        page.close(verbose=False)
