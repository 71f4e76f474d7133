"""`avgk push`."""

import argparse

HELP = "upload a trained model to the Hub"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("repo", metavar="REPO", help="user/name on the Hub; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="make a new repository private")


def run(args: argparse.Namespace) -> None:
    from ..hub import push_folder

    print(push_folder(args.run, args.repo, private=args.private or None))
