"""`avgk init`."""

import argparse
import json
import os
import shlex
from typing import Any

from ..files import refuse_link, write_text
from ..shell import printable
from .options import data_arguments, read_splits

HELP = "look at a dataset and write a commented recipe for it"
FEW = 5_000  # training images up to which the backbone stays as it is
# up to so many training images: a timm model with weights on the Hub, and images in a step
BACKBONES = ((FEW, "resnet50.a1_in1k", 64), (50_000, "resnet50.a1_in1k", 64), (float("inf"), "convnext_tiny", 64))
ENOUGH = 8  # images of a class on average, from which on some are kept for test
SHARE = {1: "half", 2: "a third"}  # of a class that is taken at most, by the number of parts
PER_CLASS = (20, 15, 10, 5)  # test and validation images of each class, where they are taken from train
SEEN = 20_000  # images that a short fine-tuning sees in all its epochs
KNOWN = "training images; any name of timm.list_models(pretrained=True) will do"
SIZES = ((10, 1.5), (50, 2), (200, 3), (float("inf"), 5))  # K for fewer classes than this
WHY = {
    "test": "an honest number at the end; without this line they are learnt from, too",
    "validation": "the best epoch and the thresholds",
}
RECIPE = """\
# {summary}
# written by `avgk init`; train with `avgk train {out}`, change any line, or override it: `--k 3`

# model
model: {model}
{weights}
image_size: {side}  # {side_reason}
in_chans: 3  # {colour}
{what}
k: {k:g}  # classes in a set on average, for {classes:,} classes: docs/choose_k.md
head: auto  # with objective avgk, which has two, validation decides which head answers

# data
{data}

# training
output_dir: {output}
num_train_epochs: {epochs}  # {epochs_reason}
per_device_train_batch_size: {batch}  # {batch_reason}
per_device_eval_batch_size: 64
{how}
lr_scheduler_type: cosine
calibrate_k: {ks}  # sizes that can be asked for afterwards, and all between
eval_strategy: epoch  # measured after every epoch, and the best epoch is kept
save_strategy: epoch
save_total_limit: 1
load_best_model_at_end: true
logging_strategy: epoch
dataloader_num_workers: {workers}  # processes that read images
seed: 0
"""
DOWNLOADED = """\
pretrained: true  # its weights are downloaded once, so the first training needs the network
# checkpoint: weights.safetensors  # or a file of them, where there is none; `model:` must be the model they are of"""
# what learns, and how: the classes alone, or all weights
FROZEN = """\
freeze_backbone: true  # few images: only the classes are learnt, in minutes; else false, and cache_features false
objective: ce  # with a frozen network the paper's avgk gives the same: docs/which_loss.md"""
FROZEN_OPTIM = """\
optim: sgd  # with the next three lines a usual training of a linear layer
optim_args: momentum=0.9,nesterov=True
learning_rate: 0.1
weight_decay: 1.0e-4"""
WHOLE = "objective: avgk  # or ce, plain cross-entropy: docs/which_loss.md"
WHOLE_OPTIM = """\
optim: adamw_torch  # with the next two lines a usual fine-tuning
learning_rate: 3.0e-4
weight_decay: 0.05"""


def arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser)
    parser.add_argument("--model", help="timm model (one that suits this many images)")
    parser.add_argument("--checkpoint", metavar="FILE", help="its weights, a .safetensors file (downloaded)")
    parser.add_argument("--out", default="recipe.yaml", help="file to write (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace that file, where there is one")


def run(args: argparse.Namespace) -> None:
    if not args.out.lower().endswith((".yaml", ".yml")):
        raise ValueError(f"--out {args.out} gets a recipe: name a file that ends with .yaml.")
    if refuse_link(args.out).exists() and not args.overwrite:
        raise FileExistsError(
            f"{args.out} exists and is kept: name another file with --out, or replace it with --overwrite."
        )
    if args.checkpoint and not (args.model and os.path.isfile(args.checkpoint)):
        reason = "say with --model which timm model they are of" if not args.model else "there is no such file"
        raise ValueError(f"--checkpoint {args.checkpoint}: {reason}.")
    splits = read_splits(args)  # before torch is imported: the folder may not be there
    from ..data.inspection import beside_images, names_alike

    if args.model and not args.model.startswith("hf_hub:"):
        from ..weights import load_backbone

        load_backbone(args.model, None, args.checkpoint, None, None)  # refused now, and not when it is trained
    text = recipe_for(splits, args)
    write_text(args.out, text)
    print(text.partition("# written by")[0].replace("# ", ""), end="")
    if not args.checkpoint:
        print("its first training downloads weights (without a network: --model and --checkpoint)")
    alike = [" / ".join(names) for names in names_alike(splits["train"].features["label"].names)]
    for kind, found in (({"names that are alike": alike} if alike else {}) | beside_images(args.dataset)).items():
        print(printable(f"{kind}: {', '.join(found[:3])}{f' and {len(found) - 3:,} more' * (len(found) > 3)}"))
    looked = f"\n`avgk check {shlex.quote(args.dataset)}` looks at every image before that" * os.path.isdir(
        args.dataset
    )
    refused = "; names that are nearly alike are refused by the training" if "did you mean" in text else ""
    print(f"written to {args.out}; train with `avgk train {shlex.quote(args.out)}`{refused}{looked}")


def recipe_for(splits: Any, args: argparse.Namespace) -> str:
    """The recipe as text: every line that depends on the data says how."""
    from ..data.datasets import taken_of
    from ..data.inspection import count_images, sample_images, short_form, without_training

    if "train" not in splits:
        raise ValueError(f"the dataset has no split 'train', only {list(splits)}: images belong in train/<class>/.")
    near = [name for name in splits if name.lower() in ("val", "valid", "dev") and "validation" not in splits]
    counts, note = count_images(splits), ""
    parts = [] if "test" in splits or counts["train"].mean() < ENOUGH else ["test"]
    parts += [] if "validation" in splits or near else ["validation"]
    number, whole = _taken(counts["train"], len(parts)), counts["train"].sum()
    for i, part in enumerate(parts):
        given = taken_of(counts["train"], number, len(parts) - i)
        counts |= {"train": counts["train"] - given, part: given}
        taken = f"{given.sum():,} of {whole:,} training images are taken for it, {number} of each class"
        note += f"\n# no {part} split, so {taken}, {SHARE[len(parts)]} at most"
    first = [name for name in ("train", "validation", "test") if name in counts]
    counts = {name: counts[name] for name in dict.fromkeys([*first, *counts])}
    new = without_training(splits["train"].features["label"].names, counts)
    if new:
        shown = [
            f"{printable(name)}{f' (did you mean {printable(other)}?)' if other else ''}"
            for name, other in new.items()
        ]
        note += f"\n# no training image of {', '.join(shown[:5])}{f' and {len(shown) - 5:,} more' * (len(shown) > 5)}"
    images, classes = int(counts["train"].sum()), len(counts["train"])
    sides, grey = sample_images(splits["train"])
    median = sorted(sides)[len(sides) // 2]
    side = min(224, max(64, round(median / 32) * 32))
    model, batch = next((name, batch) for most, name, batch in BACKBONES if images <= most)
    usual, batch = batch, min(batch, max(images // 8, 2))
    reason = "a usual number" if batch == usual else "an eighth of the images, which are few"
    frozen = images <= FEW
    epochs = 20 if frozen else min(30, max(5, round(SEEN / images)))
    seen = f"so that about {epochs * images:,} images are seen; more helps where there is time"
    k = min(next(k for most, k in SIZES if classes < most), max(classes - 1, 1) / 2 + 0.5)
    return RECIPE.format(
        summary=short_form(counts) + note,
        out=shlex.quote(args.out) if args.out.isprintable() else "RECIPE",
        model=f"{_quoted(args.model)}  # as asked for" if args.model else f"{model}  # for {images:,} {KNOWN}",
        weights=f"checkpoint: {_quoted(args.checkpoint)}  # its weights" if args.checkpoint else DOWNLOADED,
        side=side,
        side_reason=f"the images have a shorter side of {median} pixels, in the median; 128 trains faster",
        colour="grey images, shown to the backbone as colour, which its weights know" if grey else "colour",
        k=k,
        classes=classes,
        what=FROZEN if frozen else WHOLE,
        how=FROZEN_OPTIM if frozen else WHOLE_OPTIM,
        data=_data(splits, args, near, dict.fromkeys(parts, number), frozen, new),
        output=_quoted(f"runs/{os.path.splitext(os.path.basename(args.out))[0]}"),
        epochs=epochs,
        epochs_reason="of seconds each, after one pass through the network" if frozen else seen,
        batch=batch,
        batch_reason=reason,
        ks=json.dumps([size for size in (1, 1.5, 2, 3, 5, 10) if size < classes]),
        workers=0 if frozen else min(4, (os.cpu_count() or 1) - 1),
    )


def _taken(train: Any, parts: int) -> int:
    """How many images of each class each of so many parts takes from train.

    As many as leave two thirds of the images to train on, where the least number does.
    """
    from ..data.datasets import taken_of

    leave_enough = (n for n in PER_CLASS if 3 * parts * taken_of(train, n, parts).sum() <= train.sum())
    return next(leave_enough, PER_CLASS[-1])


def _data(
    splits: Any,
    args: argparse.Namespace,
    near: list[str],
    taken: dict[str, int],
    frozen: bool,
    new: dict[str, str | None],
) -> str:
    """The data block: names in quotes, because they may hold anything."""
    lines = [f"dataset: {_quoted(args.dataset)}"]
    for column in ("image", "label"):
        if (given := getattr(args, f"{column}_column")) != column:
            lines.append(f"{column}_column: {_quoted(given)}")
    if args.allow_outside:
        lines.append("allow_outside: true")
    if near:
        lines.append(f"validation_split: {_quoted(near[0])}")
    for part, number in taken.items():
        lines.append(
            f"{part}_per_class: {number}  # of each class, {SHARE[len(taken)]} at most, taken from train: {WHY[part]}"
        )
    if "test" not in splits and "test" not in taken:
        why = "few images, and no split is called test, so only validation is reported"
        lines.append(f"# {why}: name one with `test_split:`, or take it with `test_per_class: 3`")
    if new:  # a name that is nearly one of train is refused by the training
        allowed = "allow_new_classes: true  # some classes have no training image, and cannot be learnt"
        lines.append(f"# {allowed}" if any(new.values()) else allowed)
    lines.append("calibration_split: auto  # half of validation is kept for it, where there are images enough")
    kept = "cache_features: true  # what the network makes of each image is computed once and kept, below HF_HOME"
    lines.append(kept if frozen else "augmentation: timm  # random crops and flips")
    lines.append("on_bad_image: skip  # an image that cannot be read is left out and counted")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
