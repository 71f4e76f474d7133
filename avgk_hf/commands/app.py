"""`avgk app`."""

import argparse

from .options import check_model

HELP = "show a calibrated model's sets on a page in the browser"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a calibrated model")
    parser.add_argument("--port", type=int, default=7860, help="where to listen on 127.0.0.1 (%(default)s)")
    parser.add_argument("--examples", metavar="DIR", help="folder of example images (for glyphs they are drawn)")
    word = "what the page calls a class: `species`, or `bird/birds` for one and many (%(default)s)"
    parser.add_argument("--noun", default="class/classes", help=word)
    parser.add_argument("--space", metavar="DIR", help="write the page as a folder for a Hugging Face Space instead")


def run(args: argparse.Namespace) -> None:
    check_model(args.model)
    from ..app.page import serve
    from ..app.space import write_space

    if args.space:
        print(write_space(args.model, args.space, args.examples, args.noun))
    else:
        serve(args.model, args.port, args.examples, args.noun)
