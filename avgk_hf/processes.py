"""Several processes, one answer: what losses and evaluation exchange with the other processes of a training.

Every function also works in a single process, where it exchanges nothing.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .set_statistics import SetStatistics
from .sets import AverageKThreshold


def world_size() -> int:
    """The number of processes W that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, in [0, W)."""
    return dist.get_rank() if world_size() > 1 else 0


def gather(values: Tensor) -> Tensor:
    """The tensors of all processes, (W, *shape), in the order of the processes; all must have the same shape."""
    if world_size() == 1:
        return values[None]
    everyone = values.new_empty(world_size() * values.numel())  # flat, because not every backend stacks
    dist.all_gather_into_tensor(everyone, values.reshape(-1))
    return everyone.view(world_size(), *values.shape)


def mean_over_processes(value: Tensor) -> Tensor:
    """The mean of a scalar over all processes, with the gradient that averaging the gradients later makes right."""
    if world_size() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return value + (total / world_size() - value.detach())


def broadcast(tensors: list[Tensor]) -> None:
    """Overwrite the tensors with those of the main process."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def gather_list(items: list) -> list:
    """The items of all processes, one process after the other."""
    if world_size() == 1:
        return items
    parts: list[list] = [[]] * world_size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def merge_statistics(statistics: SetStatistics, device: torch.device) -> None:
    """Give every process the statistics over the images of all processes.

    The rows of an image are filled by one process and 0 elsewhere, so that their sum is exact. Of the scores, only
    those travel that the thresholds can need, one process at a time: O(K n) memory.

    Args:
        statistics: What this process collected, at the positions of its own images.
        device: Where the backend expects tensors.
    """
    if world_size() == 1:
        return
    for column in statistics.columns(device).values():
        dist.all_reduce(column)
    if statistics.stream is not None:
        statistics.stream = _merge_streams(statistics.stream, device)
    statistics.num_seen = int(_sum(statistics.num_seen, device))
    statistics.num_labels = int(gather(torch.tensor(statistics.num_labels, device=device)).max())


def sum_over_processes(value: float, device: torch.device) -> float:
    """The sum of a number over all processes."""
    return value if world_size() == 1 else float(_sum(value, device))


def _sum(value: float, device: torch.device) -> Tensor:
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total


def _merge_streams(stream: AverageKThreshold, device: torch.device) -> AverageKThreshold:
    merged = AverageKThreshold(stream.ks, stream.num_examples)
    own = stream.survivors(device)
    facts = torch.tensor([len(own), *stream.facts()], dtype=torch.float64, device=device)
    for source, (count, *facts_of_source) in enumerate(gather(facts).tolist()):
        values = own if source == rank() else torch.empty(int(count), device=device)
        dist.broadcast(values, source)
        merged.merge(values, *facts_of_source)
    return merged
