"""New processes that need not import anything heavy: each is a fork of one that has imported what others publish.

A user's program starts with imports that take longer than most of what the tests look at. What a library reads from
the environment on import, such as the place of the Hub's cache, is the same for all programs of a `Forks` that imports
it beforehand: `EVERYTHING` does, `TENSORS` leaves to each program what reads the environment. This package is not
imported before a program does it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

EVERYTHING = """
import datasets, evaluate, huggingface_hub, timm, torch, transformers
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, pipeline
"""
TENSORS = "import numpy, pandas, PIL.Image, pyarrow.parquet, torch, torchvision, torch.distributed, torch.export"
DRIVER = """
import json, os, sys, threading, traceback

def begin(job, number, pipes):
    child = os.fork()
    if child:
        return child
    for place, (_, writing) in enumerate(pipes, 1):
        os.dup2(writing, place)
    code = 1
    try:
        os.chdir(job["folder"])
        os.environ.clear(), os.environ.update(job["env"] or start)
        os.environ.update(job["of_each"][number])
        sys.path[:0] = ["", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # as with `python -c`
        sys.argv = ["-c", *job["arguments"][number]]
        exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush(), os._exit(code)

def read(pipe, texts, place):
    with open(pipe, errors="replace") as file:
        texts[place] = file.read()

start = dict(os.environ)
for line in sys.stdin:
    job, ended = json.loads(line), []
    for number in range(len(job["arguments"])):  # all of them are begun before any is waited for
        pipes, texts = [os.pipe(), os.pipe()], [None, None]
        child = begin(job, number, pipes)
        readers = []
        for place, (reading, writing) in enumerate(pipes):
            os.close(writing)
            readers.append(threading.Thread(target=read, args=[reading, texts, place]))
        for reader in readers:
            reader.start()
        ended.append((child, readers, texts))
    answers = []
    for child, readers, texts in ended:
        for reader in readers:
            reader.join()
        answers.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *texts])
    print(json.dumps(answers), flush=True)
"""


class Ended(NamedTuple):
    """What a program left: its exit code (negative: the signal), and what it printed."""

    code: int
    out: str
    err: str


class Forks:
    """Runs programs in forked processes.

    Args:
        env: The environment of all of them, and of what is imported beforehand.
        imports: That.
    """

    def __init__(self, env: dict[str, str], imports: str = EVERYTHING) -> None:
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        self._driver = subprocess.Popen([sys.executable, "-c", imports + DRIVER], **pipe)

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *exception: object) -> None:
        self._driver.stdin.close()
        self._driver.wait()
        self._driver.stdout.close()

    def run(self, code: str, *arguments: Any, folder: Any, env: dict[str, str] | None = None) -> Ended:
        """What becomes of a program, as of `python -c CODE ARGUMENTS` in a folder, and in an environment."""
        return self.run_together(code, [arguments], folder, env)[0]

    def run_together(
        self,
        code: str,
        arguments: Sequence[Sequence[Any]],
        folder: str | Path,
        env: dict[str, str] | None = None,
        of_each: Sequence[dict[str, str]] | None = None,
    ) -> list[Ended]:
        """The same of several programs that run at the same time, each with its arguments and environment besides."""
        job = {"code": code, "folder": os.fspath(folder), "env": env, "of_each": of_each or [{}] * len(arguments)}
        job["arguments"] = [list(map(str, given)) for given in arguments]
        self._driver.stdin.write(json.dumps(job) + "\n")
        self._driver.stdin.flush()
        return [Ended(*answer) for answer in json.loads(self._driver.stdout.readline())]
