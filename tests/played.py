"""Two processes without the seconds that starting them takes; test_processes.py has real ones."""

import threading

import torch


class Processes:
    """Two processes that exchange tensors as torch.distributed does, played by two threads."""

    def __init__(self, monkeypatch):
        self.own, self.slots, self.barrier = threading.local(), [None, None], threading.Barrier(2, timeout=30)
        names = ("is_initialized", "get_world_size", "get_rank", "all_gather_into_tensor", "all_reduce", "broadcast")
        for name in names:
            monkeypatch.setattr(f"torch.distributed.{name}", getattr(self, name))

    def is_initialized(self):
        return hasattr(self.own, "rank")  # the thread of the test is a single process

    def get_world_size(self):
        return 2

    def get_rank(self):
        return self.own.rank

    def _exchange(self, value):
        self.slots[self.own.rank] = value.clone()
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def all_gather_into_tensor(self, output, value):
        output.copy_(torch.cat(self._exchange(value)))

    def all_reduce(self, value):
        value.copy_(sum(self._exchange(value)))

    def broadcast(self, value, source):
        value.copy_(self._exchange(value)[source])

    def run(self, work):
        results = [None, None]

        def process(rank):
            self.own.rank = rank
            try:
                results[rank] = work(rank)
            except Exception:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
