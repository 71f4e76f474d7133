"""The page of `avgk app`: drop an image, choose K, see the set and how it grows; here or as a Hugging Face Space."""

from importlib.util import find_spec

if find_spec("gradio") is None:  # it is imported by `page` alone, when the model is known to have an answer
    raise ImportError("the page is a Gradio app: `pip install 'avgk_hf[app]'`.")
