"""What `test_processes.py` does in one process and in two, each writing what it found to a folder."""

import json
import os
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from datasets import load_from_disk
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from transformers import EvalPrediction

from avgk_hf import AvgKForImageClassification, AvgKOutput, AvgKTrainer, AvgKTrainingArguments, prepare
from avgk_hf.calibration import Calibration
from avgk_hf.confusions import Listed
from avgk_hf.evaluation import evaluate
from avgk_hf.losses import LOSSES, make_loss
from avgk_hf.losses.avgk import choose_among_all, choose_candidates
from avgk_hf.processes import gather_list, rank, world_size

BATCH, CLASSES, EXAMPLES = 64, 20, 200
SIZES = (1, 2, 3, 7, 30)


def share(rows: torch.Tensor) -> torch.Tensor:
    """The rows that this process trains on."""
    return rows.chunk(world_size())[rank()]


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return images, labels, torch.randperm(EXAMPLES, generator=generator)[:BATCH]


def candidates(kind: str, k: float) -> list[int]:
    """The candidates of the whole batch, as positions in it; `ties` has few distinct scores, and more than are cut."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(BATCH, CLASSES, generator=generator)
    if kind == "one process":  # all candidates lie in the second half of the batch
        logits[: BATCH // 2] = 0
        logits[BATCH // 2 :, ::2] += 20
    scores = logits.round() if kind == "ties" else logits.log_softmax(1)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    number = round((k - 1) * BATCH)
    own = share(scores).clone()
    found = choose_candidates(own, share(labels), number).sort().values
    found = found[choose_among_all(own.view(-1)[found], number)]
    return sorted(gather_list((found + rank() * own.numel()).tolist()))


def gradients(objective: str, **fields) -> dict[str, torch.Tensor]:
    """The gradient of every parameter after averaging over the processes, and ROLE's estimates after two steps."""
    torch.manual_seed(0)
    given = {"avgk": {"alpha": 0.7}, "epr": {"beta": 0.3}, "role": {"role_lambda": 0.2}, "topk": {"epsilon": 0.0}}
    fields = {"k": 3.5, **given.get(objective, {}), **fields}
    model = AvgKForImageClassification.from_timm("test_vit", CLASSES, image_size=32, objective=objective, **fields)
    loss = make_loss(model.config, EXAMPLES)
    trained = DistributedDataParallel(model) if world_size() > 1 else model
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.5)
    values = []
    for step in range(2):
        images, labels, index = map(share, batch(step))
        optimizer.zero_grad()
        value = loss(trained(images), labels, index)
        value.backward()
        optimizer.step()
        values.append(value.detach())
    result = {name: parameter.grad for name, parameter in model.named_parameters()}
    result["loss"] = torch.stack(values)
    if world_size() > 1:
        dist.all_reduce(result["loss"])
        result["loss"] /= world_size()
    return {**result, **loss.state_dict()}


def in_order(prediction: EvalPrediction) -> dict[str, int]:
    """A number that depends on the order of the images too."""
    best, places = prediction.predictions.argmax(1), np.arange(len(prediction.label_ids))
    return {"in_order": (places * (10 * best + prediction.label_ids)).sum()}


def evaluations(folder: Path, images: str) -> dict[str, dict]:
    """Metrics, thresholds and sets of the first n images, for several n."""
    splits = load_from_disk(images)
    torch.manual_seed(0)
    names = dict(enumerate(splits["train"].features["label"].names))
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=names, k=2, image_size=32)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer += rank()  # as after training steps on different images
    found, model.config.train_counts = {}, [30, 14, 10, 8, 6, 4]
    for n in SIZES:
        some = splits["validation"].shuffle(seed=0).select(range(n))
        data = prepare(some, model.config)
        arguments = {"per_device_eval_batch_size": 2, "calibrate_k": [1, 1.5, 3], "dataloader_pin_memory": False}
        arguments |= {"calibrate_coverage": [0.5, 0.9], "calibrate_per_class": True, "balance": "auto"}
        args = AvgKTrainingArguments(str(folder / "none"), disable_tqdm=True, dataloader_drop_last=True, **arguments)
        trainer = AvgKTrainer(model, args, eval_dataset=data, compute_metrics=in_order)
        metrics = trainer.evaluate()
        held = max(len(statistics.stream._held) for statistics in trainer.evaluation.statistics.values())
        prediction = trainer.predict(data)
        timeless = {
            name: value
            for name, value in {**metrics, **prediction.metrics}.items()
            if not name.endswith(("time", "per_second"))
        }
        listed = Listed(model.config)
        evaluate(model, some, batch_size=2, listed=[listed])
        found[str(n)] = {
            "listed": [listed.by_class(), listed.ids.tolist(), listed.longest(n).tolist()],
            "metrics": timeless,
            "thresholds": model.config.calibration["head_thresholds"],
            "coverage": Calibration.of(model.config).coverage,
            "curve": model.config.calibration["curve"],
            "balances": [model.config.calibration[name] for name in ("balances", "tradeoff", "prevalence")],
            "sets": prediction.predictions,
            "labels": prediction.label_ids.tolist(),
            "held": held,
            "examples": model.config.calibration["num_examples"],
        }
    return found


def sent_values(k: float) -> int:
    """How many values one process sends for one AVG-K loss, counted at the collectives themselves."""
    sent, original = [], dist.all_gather_into_tensor

    def count(output: torch.Tensor, values: torch.Tensor) -> None:
        sent.append(values.numel())
        original(output, values)

    dist.all_gather_into_tensor = count
    logits = torch.randn(BATCH // 2, CLASSES, requires_grad=True)
    LOSSES["avgk"](k=k)(AvgKOutput(logits=logits, sccp_logits=logits), torch.zeros(BATCH // 2, dtype=torch.long))
    LOSSES["avgk"](k=k, candidate_scope="local")(
        AvgKOutput(logits=logits, sccp_logits=logits), torch.zeros(BATCH // 2, dtype=torch.long)
    )
    dist.all_gather_into_tensor = original
    return sum(sent)


def train(folder: Path, images: str, recipe: str) -> list[str]:
    """Train from a recipe and calibrate again; the files that any process but the first opened for writing.

    Python does not see what libraries open, weights and optimizer state: there a limit of the file size makes any
    process but the first fail. Its random state, which it has to save, is smaller.
    """
    from avgk_hf import cli
    from avgk_hf.train import main

    written: set[str] = set()

    def watch(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            written.add(os.fsdecode(arguments[0]))

    sys.addaudithook(watch)
    if rank() > 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    main([recipe])
    dist.barrier()  # the run is written
    assert cli.main(["calibrate", str(folder / "run"), images, "--k", "1.5", "--batch-size", "4"]) == 0
    kept = [path for path in written if path.startswith(str(folder))]
    return gather_list([] if rank() == 0 else kept)


def resumed(folder: Path, recipe: str) -> None:
    """Train with ROLE, and again from a checkpoint inside the first epoch, which is all that a killed run leaves."""
    from avgk_hf.train import main

    steps = ["--eval_strategy", "steps", "--save_strategy", "steps", "--eval_steps", "2", "--save_steps", "2"]
    options = [recipe, *steps, "--objective", "role", "--augmentation", "timm", "--push_to_hub", "false"]
    main([*options, "--output_dir", str(folder / "whole")])
    if rank() == 0:
        shutil.copytree(folder / "whole" / "checkpoint-2", folder / "killed" / "checkpoint-2")
    dist.barrier()
    main([*options, "--output_dir", str(folder / "killed"), "--resume_from_checkpoint", "last"])


OBJECTIVES = {"avgk": {}, "local": {"candidate_scope": "local"}, "ce": {}, "an": {}, "epr": {}, "role": {}, "topk": {}}


def everything(folder: Path, images: str, recipe: str | None = None) -> None:
    """Write what this process, or the first of several, found to the folder."""
    AvgKTrainingArguments(str(folder / "none"))  # joins the processes
    choices = {f"{kind} {k}": candidates(kind, k) for kind in ("random", "ties", "one process") for k in (2, 3.5, 9)}
    found = {"world": world_size(), "candidates": choices, "evaluations": evaluations(folder, images)}
    for name, fields in OBJECTIVES.items():
        tensors = gradients("avgk" if name == "local" else name, **fields)
        if rank() == 0:
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    if world_size() > 1:
        found["sent"] = {k: sent_values(k) for k in (2, 3.5, 19)}
    if recipe:
        resumed(folder, recipe)
        found["written"] = train(folder, images, recipe)
    if rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    everything(Path(sys.argv[1]), *sys.argv[2:])
    if world_size() > 1:
        dist.destroy_process_group()
