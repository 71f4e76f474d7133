"""Shards of predicted sets on a Ray cluster: every actor of a pool holds the model and writes one shard at a time.

Source and folder have to be on a file system that all nodes share. Ray Data's own `write_parquet` names files
by ids of its own; a shard has the number of its images, so that a run can be completed by either engine.
"""

import json
import os
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from huggingface_hub.utils import tqdm

from .classifiers import best_device, load_classifier
from .data.sources import Piece, Source
from .prediction import Predictor, Shards, Tally
from .questions import Question

TOGETHER = 8  # shards for each actor that are handed to Ray at once, with the names of their images


class ShardWriter:
    """What an actor does.

    Args:
        here: The folder that paths are relative to: Ray's workers start in folders of their own.
        model: Folder or Hub id.
        given: What `Predictor`, `Source` and `Shards` are made of.
    """

    def __init__(self, here: str, model: str, given: dict[str, dict[str, Any]]) -> None:
        os.chdir(here)
        predictor = Predictor(load_classifier(model).to(best_device(join=False)), **given["predictor"])
        self.shards = Shards(predictor=predictor, source=Source(**given["source"]), **given["shards"])

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[str]]:
        """Write shards; what comes back is what they came to."""
        tally = self.shards.predictor.tally = Tally()
        for shard, text in zip(batch["shard"].tolist(), batch["pieces"], strict=True):
            self.shards.write([(shard, [Piece.unpacked(*piece) for piece in json.loads(text)])], shown=False)
        return {"tally": [json.dumps(vars(tally))]}


def write_on_ray(shards: Shards, model: str, questions: Sequence[Question], how: dict[str, Any]) -> None:
    """Write all shards that are not there on the Ray cluster that this process belongs to, or RAY_ADDRESS names."""
    try:
        import ray.data
    except ImportError as error:
        raise ImportError("--engine ray needs `pip install 'avgk_hf[ray]'`.") from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError as error:
            raise OSError("no Ray cluster runs here: `ray start --head` starts one, RAY_ADDRESS names one.") from error
    resources, tally = ray.cluster_resources(), shards.predictor.tally
    own = {"predictor": {"questions": questions, **how}, "source": shards.source.record()}
    own["shards"] = {"folder": str(shards.folder), "size": shards.size}
    gpus, given = int(resources.get("GPU", 0)), {"fn_constructor_args": (os.getcwd(), model, own)}
    given |= {"num_gpus": 1} if gpus else {"num_cpus": 1}
    most, missing = gpus or max(int(resources.get("CPU", 1)), 1), shards.missing()
    with tqdm(desc="predict", unit="image", total=shards.number()) as bar:
        while window := [_item(*each) for each in islice(missing, max(TOGETHER * most, 128))]:
            pool = ray.data.ActorPoolStrategy(min_size=1, max_size=min(most, len(window)))
            data = ray.data.from_items(window, override_num_blocks=len(window))
            for row in data.map_batches(ShardWriter, batch_size=1, compute=pool, **given).iter_rows():
                found = json.loads(row["tally"])
                tally.merge(Tally(**found))
                bar.update(found["images"])


def _item(shard: int, pieces: list[Piece]) -> dict[str, Any]:
    return {"shard": shard, "pieces": json.dumps([piece.packed() for piece in pieces])}
