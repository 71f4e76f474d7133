"""`avgk card`."""

import argparse
from pathlib import Path

from ..files import new_file, refuse_link

HELP = "write the model card of a run"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a finished `avgk train`")
    parser.add_argument("--repo", help="name of the model, as users load it (the folder's name)")
    parser.add_argument("--out", help="file to write (RUN/README.md)")


def run(args: argparse.Namespace) -> None:
    from ..model_card import card_of_run

    if args.out and not args.out.lower().endswith(".md"):
        raise ValueError(f"--out {args.out} gets Markdown: name a file that ends with .md.")
    out = Path(args.out or Path(args.run) / "README.md")
    refuse_link(out.parent)
    card = card_of_run(args.run, args.repo)
    with new_file(out) as new:
        card.save(new)
    print(f"written to {out}")
