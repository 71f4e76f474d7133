"""The page of the Space: type scores and labels, read the metric. Run it with `python app.py`.

`evaluate.utils.launch_gradio_widget` cannot serve here: it needs gradio 3, and has no fields for `k` and lambda_val.
"""

import json
from pathlib import Path
from typing import Any

import evaluate
from evaluate.utils.gradio import parse_readme

FOLDER = Path(__file__).resolve().parent
SCORES = "[[0.9, 0.1, 0.0],\n [0.5, 0.4, 0.1]]"
LABELS = "[0, 1]"


def compute(scores: str, labels: str, k: float, calibrate: bool, lambda_val: float, kind: str) -> dict[str, Any]:
    """The metric for scores and labels given as JSON.

    Example:
        >>> compute(SCORES, LABELS, k=1.5, calibrate=True, lambda_val=0, kind="scores")["mean_set_size"]
        1.5
    """
    metric = evaluate.load(str(FOLDER), keep_in_memory=True)  # one for each request, as visitors come at the same time
    asked = {"k": k, "kind": kind, "calibrate": calibrate, "lambda_val": None if calibrate else lambda_val}
    return metric.compute(predictions=json.loads(scores), references=json.loads(labels), **asked)


def main() -> None:
    """Serve the page."""
    import gradio as gr

    page = gr.Interface(
        fn=compute,
        inputs=[
            gr.Textbox(SCORES, lines=5, label="predictions: one row of scores for each image, as JSON"),
            gr.Textbox(LABELS, label="references: the true class of each image, as JSON"),
            gr.Number(1.5, label="k: the average set size"),
            gr.Checkbox(True, label="calibrate: compute lambda_val on these images"),
            gr.Number(0.5, label="lambda_val from validation, used without calibrate"),
            gr.Radio(["scores", "softmax", "sigmoid"], value="scores", label="kind of the predictions"),
        ],
        outputs=gr.JSON(label="average_k_accuracy"),
        title="Metric: average_k_accuracy",
        article=parse_readme(FOLDER / "README.md"),
    )
    page.launch(show_error=True)


if __name__ == "__main__":
    main()
