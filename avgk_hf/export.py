"""Export a calibrated model for use without this package: one ONNX graph from pixels to scores and sets.

    avgk export MODEL --onnx

The graph takes `pixel_values` (b, C, H, W) and the threshold `lambda_val`, a scalar, and gives `scores` (b, L) and the
mask `set` (b, L). Thresholds {K: lambda_val}, class names and a description of the preprocessing, which stays outside,
are in the file's metadata, so K is chosen at run time. Only the head that answers is exported.
"""

import copy
import importlib
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel

from .calibration import Calibration
from .classifiers import image_processor, model_scores, transform_for
from .configuration import processor_config
from .data import align_labels
from .evaluation import Evaluation, run_model
from .files import check_output_dir, copy_file, replacing, write_text
from .modeling import AvgKForImageClassification
from .questions import Question
from .scores import restricted, view_logits
from .sets import k_key

logger = logging.getLogger(__name__)
MODEL, INT8, REPORT, PROCESSOR = "model.onnx", "model.int8.onnx", "export.json", "preprocessor_config.json"
NAMES = {"input_names": ["pixel_values", "lambda_val"], "output_names": ["scores", "set"]}


class SetClassifier(nn.Module):
    """Pixels and a threshold to scores and sets, as one module that `torch.export` and `torch.onnx` take.

    A set that would be empty holds the best class, as in the pipeline and in `avgk predict`; the others are in
    `scores >= lambda_val`. Logits that are NaN are not refused here.

    Args:
        backbone: Images (b, C, H, W) to features (b, d).
        heads: One or two linear layers on the features; the mean of two heads' scores counts.
        kind: As in `score`.
        classes: As in `score`.
        weights: Of a balance, (L,), or None.
        flip: Whether scores are means over an image and its mirror image.
    """

    def __init__(
        self,
        backbone: nn.Module,
        heads: list[nn.Module],
        kind: str,
        classes: list[int] | None = None,
        weights: Tensor | None = None,
        flip: bool = False,
    ) -> None:
        super().__init__()
        self.backbone, self.heads, self.kind, self.classes = backbone, nn.ModuleList(heads), kind, classes
        self.flip = flip
        self.register_buffer("weights", weights)

    def forward(self, pixel_values: Tensor, lambda_val: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (b, L) in float32 and the sets (b, L) as a mask."""
        logits = self._logits(pixel_values)
        if self.flip:
            both = zip(logits, self._logits(pixel_values.flip(-1)), strict=True)
            logits = [view_logits(*views, self.kind) for views in both]
        scores = sum(restricted(each, self.kind, self.classes) for each in logits) / len(logits)  # (b, L)
        scores = scores if self.weights is None else scores * self.weights
        best = torch.arange(scores.shape[-1], device=scores.device) == scores.argmax(-1, keepdim=True)
        return scores, (scores >= lambda_val) | best

    def _logits(self, pixel_values: Tensor) -> list[Tensor]:
        features = self.backbone(pixel_values)  # (b, d)
        return [head(features).float() for head in self.heads]


class _Logits(nn.Module):
    """A classifier of transformers as a module that gives its logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values).logits


def exportable(model: PreTrainedModel, k: float | None = None, balance: float | None = None) -> SetClassifier:
    """A copy of a calibrated classifier as one module from pixels to sets, in float32 and without unused heads.

    Args:
        model: An `AvgKForImageClassification`, or any calibrated classifier of transformers.
        k: The average set size whose head answers, which matters for `head="auto"`; default the model's own.
        balance: As in `Question`, a constant of the module; default the model's own.

    Example:
        >>> model = AvgKForImageClassification.from_timm("test_resnet", num_labels=10, k=2, image_size=32)
        >>> calibration = Calibration.store(model.config, {2: 0.1})
        >>> inputs = torch.zeros(4, 3, 32, 32), torch.tensor(calibration.threshold(2))
        >>> batch = ({0: torch.export.Dim("batch")}, None)
        >>> program = torch.export.export(exportable(model), inputs, dynamic_shapes=batch)
        >>> scores, sets = program.module()(torch.zeros(7, 3, 32, 32), torch.tensor(0.0))
        >>> sets.sum(1).tolist()
        [10, 10, 10, 10, 10, 10, 10]
    """
    calibration = Calibration.of(model.config).at(balance)
    head, how = calibration.answer(Question(k=k)).head, (calibration.classes, calibration.weights)
    if isinstance(model, AvgKForImageClassification):
        heads = {"ml": [model.ml_head], "sccp": [model.sccp_head], "mean": [model.ml_head, model.sccp_head]}[head]
        flip = model.config.test_time_augmentation == "flip"
        module = SetClassifier(model.backbone, heads, model.config.score, *how, flip)
    else:
        module = SetClassifier(_Logits(model), [nn.Identity()], calibration.score, *how)
    return copy.deepcopy(module).float().cpu().eval().requires_grad_(False)


def export_onnx(
    model: PreTrainedModel,
    out: str | Path,
    k: float | None = None,
    opset: int | None = None,
    int8: bool = False,
    dataset: Dataset | None = None,
    batch_size: int = 64,
    balance: float | None = None,
) -> dict[str, Any]:
    """Write model.onnx, preprocessor_config.json and export.json, with `int8` also model.int8.onnx.

    int8 is onnxruntime's dynamic quantisation: weights of convolutions and matrix products become 8 bit, activations
    are quantised while running. Scores move a little, and with them the sizes of the sets, so it should be measured.

    Args:
        model: A calibrated classifier.
        out: Folder to write to.
        k: As in `exportable`.
        opset: Version of the ONNX operators; default what the installed torch prefers.
        int8: Whether to write a quantised graph too.
        dataset: Labelled images on which graphs are measured, one split of `load_splits`.
        batch_size: Images per run of the graph on them.
        balance: As in `exportable`.

    Returns:
        What export.json holds: inputs, opset, thresholds, sizes of the files, and what was measured.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"the export needs {name} ({error}): `pip install 'avgk_hf[onnx]'`.") from error
    module, transform, processor = exportable(model, k, balance), transform_for(model), _processor(model)
    shape = tuple(transform.image(Image.new(transform.mode, (64, 64))).shape)  # (C, H, W)
    check_output_dir(out, "--out")
    report = _what_is_served(model, k, shape, balance)
    program = _to_onnx(module, shape, report["thresholds"][k_key(report["k"])], opset)
    report["opset"] = program.model.opset_imports[""]
    names = {str(i): model.config.id2label[i] for i in range(model.config.num_labels)}
    known = {name: report[name] for name in ("thresholds", "k", "score", "head", "balance", "opset")}
    for name, value in {**known, "id2label": names, "preprocessing": processor}.items():
        program.model.metadata_props[name] = json.dumps(value, ensure_ascii=False)
    with tempfile.TemporaryDirectory() as work:  # a graph that is refused, or a stop, leaves the folder as it was
        folder = Path(work)
        program.save(folder / MODEL)
        report["largest_difference"] = _difference(model, module, folder / MODEL, shape, report)
        if int8:
            _quantise(folder / MODEL, folder / INT8)
        report |= _measured(
            model, folder, [MODEL, INT8] if int8 else [MODEL], dataset, report["thresholds"], batch_size
        )
        write_text(folder / PROCESSOR, json.dumps(processor, indent=2) + "\n")
        write_text(folder / REPORT, json.dumps(report, indent=2) + "\n")
        with replacing(out) as new:
            for path in folder.iterdir():
                copy_file(path, new / path.name)
    if not int8:
        Path(out, INT8).unlink(missing_ok=True)  # of another model
    return report


def _what_is_served(
    model: PreTrainedModel, k: float | None, shape: tuple[int, ...], balance: float | None
) -> dict[str, Any]:
    """Inputs and outputs of the graph, and the K that its head answers for, with their thresholds."""
    config, calibration = model.config, Calibration.of(model.config).at(balance)
    k = calibration.k if k is None else k
    head, heads = calibration.head(k), {other: calibration.head(other) for other in calibration.ks}
    served = sorted({k, *(other for other in heads if heads[other] == head)})  # also a K in between
    left_out = {k_key(other): f"its head is {heads[other]!r}" for other in heads if other not in served}
    return {
        "inputs": {"pixel_values": ["batch", *shape], "lambda_val": []},
        "outputs": {"scores": ["batch", config.num_labels], "set": ["batch", config.num_labels]},
        "k": json.loads(k_key(k)),  # as the keys of the thresholds have it
        "score": calibration.score,
        "head": head,
        "balance": calibration.balance,
        "thresholds": {k_key(other): calibration.threshold(other) for other in served},
        **({"left_out": left_out} if left_out else {}),
    }


def _measured(
    model: PreTrainedModel,
    folder: Path,
    files: list[str],
    dataset: Dataset | None,
    thresholds: dict[str, float],
    batch_size: int,
) -> dict[str, Any]:
    """Sizes of the graphs and, on a dataset, how well they do and what 8 bits change."""
    found: dict[str, Any] = {"bytes": {name: (folder / name).stat().st_size for name in files}}
    if dataset is not None:
        found |= {"split": str(dataset.split or "the dataset"), "num_images": len(dataset)}
        results = {name: measure_onnx(folder / name, dataset, model, thresholds, batch_size) for name in files}
        found["measured"] = results
        if INT8 in results:
            found["int8_difference"] = {name: results[INT8][name] - plain for name, plain in results[MODEL].items()}
    return found


def _to_onnx(module: SetClassifier, shape: tuple[int, ...], lambda_val: float, opset: int | None) -> Any:
    """The ONNX program of a module; the batch of the example is not 1, which would be taken for a constant."""
    if opset is not None and (isinstance(opset, bool) or not isinstance(opset, int) or opset < 1):
        raise ValueError(f"opset={opset!r} must be a whole number, e.g. `--opset 18`.")
    inputs = torch.zeros(2, *shape), torch.tensor(lambda_val, dtype=torch.float32)
    with warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")  # of torch to itself
        try:
            program = torch.onnx.export(
                module, inputs, dynamo=True, opset_version=opset, verbose=False,
                dynamic_shapes={"pixel_values": {0: "batch"}, "lambda_val": None}, **NAMES,
            )  # fmt: skip
        except (torch.onnx.errors.OnnxExporterError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"torch cannot export this model to ONNX ({reason}).") from error
    given = program.model.opset_imports[""]
    if opset not in (None, given):
        raise ValueError(
            f"opset {opset} cannot be had: torch {torch.__version__} gives {given}. Leave --opset out, or ask for 18"
            " or later."
        )
    for node in program.model.graph.all_nodes():  # torch notes the line of code of each, with local paths
        node.metadata_props.clear()
    return program


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Keep loggers from saying anything below an error for a while; the root logger has the name ""."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


def _session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def _run(session: Any, pixel_values: Tensor, lambda_val: float) -> tuple[np.ndarray, np.ndarray]:
    return session.run(None, {"pixel_values": pixel_values.numpy(), "lambda_val": np.array(lambda_val, np.float32)})


def _difference(
    model: PreTrainedModel, module: SetClassifier, path: Path, shape: tuple[int, ...], report: dict[str, Any]
) -> float:
    """The largest difference of a score between the model and the graph; a graph that is not the module is refused."""
    k, balance, lambda_val = report["k"], report["balance"], report["thresholds"][k_key(report["k"])]
    pixels = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    expected, found = module(pixels, torch.tensor(lambda_val))[0].numpy(), _run(_session(path), pixels, lambda_val)[0]
    if not np.allclose(expected, found, rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"the exported graph gives other scores than torch, by up to {np.abs(expected - found).max():.2g}: this"
            " model cannot be used as ONNX with the installed versions of torch and onnxruntime."
        )
    inside = np.isfinite(found)  # not of classes that are left out
    difference = float(np.abs(model_scores(model, pixels, k, balance).cpu().numpy()[inside] - found[inside]).max())
    if model.dtype != torch.float32:
        logger.warning(
            f"the model computes in {str(model.dtype).removeprefix('torch.')} and the graph in float32, where scores"
            f" differ by up to {difference:.2g}, so its thresholds are not exact: calibrate and export in float32."
        )
    return difference


def _quantise(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]  # shapes that the quantiser would compare with those of the layers it transposes
    with _quiet(""):
        # unsigned, because products with signed 8-bit weights saturate on x86 processors without VNNI
        quantize_dynamic(model, target, weight_type=QuantType.QUInt8)
    quantised = onnx.load(target)
    for prop in [prop for prop in quantised.metadata_props if prop.key == "onnx.infer"]:  # all of ours are JSON
        quantised.metadata_props.remove(prop)
    onnx.save(quantised, target)


def measure_onnx(
    path: str | Path, dataset: Dataset, model: PreTrainedModel, thresholds: dict[str, float], batch_size: int = 64
) -> dict[str, float]:
    """Average-K accuracy and mean set size of an exported graph, as `avgk evaluate` measures them: sets may be empty.

    Args:
        path: The graph.
        dataset: Labelled images, one split of `load_splits`.
        model: The model it was made from, for its classes and preprocessing.
        thresholds: {K as text: lambda_val}.
        batch_size: Images per run.
    """
    dataset, session = align_labels(dataset, model.config), _session(Path(path))
    lambdas = {float(key): lambda_val for key, lambda_val in thresholds.items()}
    # the graph gives scores, so there is nothing to be done to its output
    evaluation = Evaluation(model.config, len(dataset), list(lambdas), score="logit", thresholds={"ml": lambdas})

    def compute(batch: Mapping[str, Any]) -> tuple[Any, None]:
        return SimpleNamespace(logits=torch.from_numpy(_run(session, batch["pixel_values"], 0.0)[0])), None

    run_model(model, dataset, [evaluation], batch_size, description=Path(path).name, compute=compute)
    metrics = {}
    for k, result in evaluation.results["ml"].items():
        metrics |= {f"{name}@{k_key(k)}": result[name] for name in ("average_k_accuracy", "mean_set_size")}
    return metrics


def _processor(model: PreTrainedModel) -> dict[str, Any]:
    """What the image processor does, as preprocessor_config.json holds it."""
    if isinstance(model, AvgKForImageClassification):
        return processor_config(model.config)
    return json.loads(image_processor(model).to_json_string())


def describe(report: dict[str, Any], out: str | Path) -> str:
    """The report as text."""
    shape = " x ".join(map(str, report["inputs"]["pixel_values"]))
    lines = [
        f"inputs: pixel_values ({shape}), lambda_val; outputs: scores, set; opset {report['opset']}; head"
        f" {report['head']}; balance {report['balance']:g}; thresholds for K in {', '.join(report['thresholds'])}",
        f"largest difference of a score from torch: {report['largest_difference']:.1e}",
    ]
    lines += [f"left out: K = {key}, because {reason}" for key, reason in report.get("left_out", {}).items()]
    for name, size in report["bytes"].items():
        line = f"{Path(out) / name}: {size / 1e6:.2f} MB"
        for key in report["thresholds"] if "measured" in report else ():
            found = report["measured"][name]
            accuracy, mean = found[f"average_k_accuracy@{key}"], found[f"mean_set_size@{key}"]
            line += f"\n  average-{key} accuracy {100 * accuracy:.2f}, mean set size {mean:.3f}"
        lines.append(line)
    if INT8 in report["bytes"]:
        small, plain = report["bytes"][INT8], report["bytes"][MODEL]
        lines.append(f"8 bit against float: {100 * small / plain:.0f}% of the size")
        for key in report["thresholds"] if "int8_difference" in report else ():
            found = report["int8_difference"]
            accuracy, mean = found[f"average_k_accuracy@{key}"], found[f"mean_set_size@{key}"]
            lines[-1] += f"; average-{key} accuracy {100 * accuracy:+.2f}, mean set size {mean:+.3f}"
        if "measured" not in report:
            lines[-1] += "; what it does to accuracy was not measured: --dataset DATASET"
    return "\n".join(lines)
