"""Options that several commands have."""

from ..conformal import METHODS

BAD_IMAGES = {
    "choices": ("error", "skip"),
    "default": "error",
    "help": "refuse an image that cannot be read, or leave it out and say so (%(default)s)",
}
ALLOW_OUTSIDE = {
    "action": "store_true",
    "help": "let the dataset point out of itself: links, paths of images, addresses in its README",
}
METHOD = {"choices": METHODS, "default": "lac", "help": "how coverage is reached (%(default)s)"}
