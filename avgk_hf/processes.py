"""Several processes, one answer: what losses and evaluation exchange with the other processes of a training.

Every function also works in a single process, where it exchanges nothing.
"""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .scores import wide


def world_size() -> int:
    """The number of processes W that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, in [0, W)."""
    return dist.get_rank() if world_size() > 1 else 0


def launched() -> tuple[int, int]:
    """The number of this process and of all that a launcher started, as it says: none is waited for."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def gather(values: Tensor) -> Tensor:
    """The tensors of all processes, (W, *shape), in the order of the processes; all must have the same shape."""
    if world_size() == 1:
        return values[None]
    everyone = values.new_empty(world_size() * values.numel())  # flat, because not every backend stacks
    dist.all_gather_into_tensor(everyone, values.reshape(-1))
    return everyone.view(world_size(), *values.shape)


def add_up(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors with their sums over all processes."""
    if world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def broadcast(tensors: Iterable[Tensor], source: int = 0) -> None:
    """Overwrite the tensors with those of one process, the main one by default."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, source)


def mean_over_processes(value: Tensor) -> Tensor:
    """The mean of a scalar over all processes, with the gradient that averaging the gradients later makes right."""
    if world_size() == 1:
        return value
    total = value.detach().clone()
    add_up([total])
    return value + (total / world_size() - value.detach())


def gather_list(items: list) -> list:
    """The items of all processes, one process after the other."""
    if world_size() == 1:
        return items
    parts: list[list] = [[]] * world_size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def sum_over_processes(value: float, device: torch.device) -> float:
    """The sum of a number over all processes."""
    if world_size() == 1:
        return value
    total = torch.tensor(value, dtype=wide(device), device=device)
    add_up([total])
    return float(total)
