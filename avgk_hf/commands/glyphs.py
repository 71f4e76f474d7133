"""`avgk glyphs`."""

import argparse

HELP = "write the generated glyphs as an image folder"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="folder to write split/class/image.png to")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same images (%(default)s)")


def run(args: argparse.Namespace) -> None:
    from ..data.glyphs import load_glyphs, write_image_folder

    write_image_folder(load_glyphs(args.seed), args.out)
    print(f"written to {args.out}; use it as `dataset: {args.out}`")
