"""`accelerate launch -m avgk_hf.train RECIPE`: what `avgk train` does, on several processes."""

import sys

from .recipes import main
from .shell import guarded

if __name__ == "__main__":
    sys.exit(guarded("train", main))
