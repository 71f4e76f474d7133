"""New processes that need not import anything: each is a fork of one that has imported what others publish.

A user's program starts with an import of transformers, which takes longer than most of what the tests look at. What a
library reads from the environment on import, such as the place of the Hub's cache, is the same for all programs of a
`Forks`; this package is not imported before a program does it.
"""

import json
import subprocess
import sys
from typing import Any

DRIVER = """
import json, os, sys, threading, traceback
import datasets, evaluate, huggingface_hub, timm, torch, transformers
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, pipeline

for line in sys.stdin:
    job = json.loads(line)
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if child == 0:
        for number, (_, writing) in enumerate(pipes, 1):
            os.dup2(writing, number)
        code = 1
        try:
            os.chdir(job["folder"])
            sys.path.insert(0, "")  # as with `python -c`
            sys.argv = ["-c", *job["arguments"]]
            exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush(), os._exit(code)
    texts = [None, None]
    def read(number):
        os.close(pipes[number][1])
        with open(pipes[number][0], errors="replace") as pipe:
            texts[number] = pipe.read()
    readers = [threading.Thread(target=read, args=[number]) for number in (0, 1)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *texts]), flush=True)
"""


class Forks:
    """Runs programs in forked processes.

    Args:
        env: The environment of all of them.
    """

    def __init__(self, env: dict[str, str]) -> None:
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        self._driver = subprocess.Popen([sys.executable, "-c", DRIVER], **pipe)

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *exception: object) -> None:
        self._driver.stdin.close()
        self._driver.wait()
        self._driver.stdout.close()

    def run(self, code: str, *arguments: Any, folder: Any) -> tuple[int, str, str]:
        """Exit code, output and errors of a program, as of `python -c CODE ARGUMENTS` in a folder."""
        job = {"code": code, "arguments": [str(argument) for argument in arguments], "folder": str(folder)}
        self._driver.stdin.write(json.dumps(job) + "\n")
        self._driver.stdin.flush()
        return tuple(json.loads(self._driver.stdout.readline()))
