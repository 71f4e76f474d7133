"""The page of `avgk app`: drop an image, choose K, see the set and how it grows; here or as a Hugging Face Space."""

try:
    import gradio  # noqa: F401
except ImportError as error:
    raise ImportError("the page is a Gradio app: `pip install 'avgk_hf[app]'`.") from error
