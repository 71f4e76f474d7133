"""`avgk predict` in several processes: `accelerate launch ... -m avgk_hf.predict MODEL SOURCE --out FOLDER`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(["predict", *sys.argv[1:]]))
