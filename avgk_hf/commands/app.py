"""`avgk app`."""

import argparse
import socket

from ..shell import NOUN, printable, read_noun
from .options import check_model

HELP = "show a calibrated model's sets on a page in the browser"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a calibrated model")
    parser.add_argument("--port", type=int, default=7860, help="where to listen on 127.0.0.1 (%(default)s)")
    parser.add_argument("--examples", metavar="DIR", help="folder of example images (for glyphs they are drawn)")
    word = "what the page calls a class: `species`, or `bird/birds` for one and many (%(default)s)"
    parser.add_argument("--noun", default=NOUN, help=word)
    parser.add_argument("--space", metavar="DIR", help="write the page as a folder for a Hugging Face Space instead")


def run(args: argparse.Namespace) -> None:
    """Everything that can be wrong is found, and said, before Gradio is imported."""
    from ..checks import title_of

    check_model(args.model)
    _, many = read_noun(args.noun)
    if not args.space:
        _check_port(args.port)
    from ..app.answers import Answers, chosen_examples
    from ..classifiers import load_classifier

    if args.space:
        from ..app.space import write_space

        print(write_space(args.model, args.space, args.examples, args.noun))
        return
    answers, name = Answers(load_classifier(args.model), args.noun), title_of(args.model)
    print(printable(f"{name} knows {len(answers.config.id2label):,} {many}; its page is being made."), flush=True)
    with chosen_examples(answers, args.examples) as examples:
        from ..app.page import serve

        serve(answers, name, args.port, examples)


def _check_port(port: int) -> None:
    if not 0 < port < 65536:
        raise ValueError(f"--port {port} must lie in 1 to 65535, e.g. 7860.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise OSError(f"--port {port} cannot be used ({error.strerror}); name another, e.g. {port + 1}.") from None
