"""How the benchmarks measure, and the table they print."""

import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROUNDS = 11
MIB = 2**20


@dataclass
class Table:
    """One table of the report; a row compares a measured value with the bound it has to keep.

    Args:
        title: Heading.
        note: What is measured and how.
        rows: (what, measured, bound), with a bound such as `"<= 6"` or `">= 1.2"`, or "" for a figure without one.
    """

    title: str
    note: str
    rows: list[tuple[str, float, str]] = field(default_factory=list)

    def add(self, what: str, measured: float, bound: str = "") -> None:
        """Append a row."""
        self.rows.append((what, measured, bound))

    def verdicts(self) -> list[str]:
        """OK or MISSED for each row, and "" for a row without bound."""
        return ["" if not bound else "OK" if keeps(measured, bound) else "MISSED" for _, measured, bound in self.rows]

    def __str__(self) -> str:
        lines = [f"### {self.title}", "", self.note, "", "| | measured | required | |", "|---|---:|---:|---|"]
        for (what, measured, bound), verdict in zip(self.rows, self.verdicts(), strict=True):
            lines.append(f"| {what} | {measured:.2f} | {bound} | {verdict} |")
        return "\n".join(lines) + "\n"


def keeps(measured: float, bound: str) -> bool:
    """Whether a value keeps a bound: `keeps(1.9, "<= 2")`."""
    relation, limit = bound.split()
    return measured <= float(limit) if relation == "<=" else measured >= float(limit)


def progress(text: str) -> None:
    """Say on stderr what is being measured."""
    print(f"... {text}", file=sys.stderr, flush=True)


def times(functions: dict[str, Callable[[], Any]], rounds: int = ROUNDS, seconds: float = 0.1) -> dict[str, list]:
    """CPU time of one call of each function, once per round: A, B, C, A, B, C, ...

    Args:
        functions: What to call, by name.
        rounds: Number of measurements of each.
        seconds: Time that one measurement of a short function is stretched to by calling it repeatedly.
    """
    calls = {}
    for name, function in functions.items():
        function()  # the first call pays for memory and lazy initialisation
        start = time.process_time()
        function()
        calls[name] = max(1, round(seconds / max(time.process_time() - start, 1e-6)))
    result: dict[str, list] = {name: [] for name in functions}
    gc.collect()
    gc.disable()  # as timeit does
    try:
        for _ in range(rounds):
            for name, function in functions.items():
                start = time.process_time()
                for _ in range(calls[name]):
                    function()
                result[name].append((time.process_time() - start) / calls[name])
    finally:
        gc.enable()
    return result


def ratio(measured: dict[str, list], name: str, base: str) -> float:
    """How many times longer `name` takes than `base`: the median over the rounds, each compared with its own."""
    return statistics.median(a / b for a, b in zip(measured[name], measured[base], strict=True))


def peak_tensor_bytes(function: Callable[[], Any]) -> int:
    """The most that tensors made by `function` take at one time, from the allocations that torch.profiler records."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def peak_rss_growth(function: Callable[..., Any], *args: Any) -> int:
    """Bytes by which the peak resident memory of a fresh process grows while it runs `function(*args)`.

    `function` first yields, when all is prepared, and then does what is measured.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_grow, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def _grow(sender: Any, function: Callable[..., Any], args: tuple) -> None:
    sender.send(growth(function, *args))


def growth(function: Callable[..., Any], *args: Any) -> int:
    """The same in this process, which should be a fresh one."""
    torch.set_num_threads(1)
    steps = function(*args)
    next(steps)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of the imports, is forgotten
    before = _status("VmRSS")
    next(steps, None)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A field of Linux's record of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: the memory benchmarks need Linux.")
