"""How a command ends: errors and interruptions as one line and an exit code."""

import os
import signal
import sys
import threading
from collections.abc import Callable


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM, as job schedulers do."""


def _terminate(*_: object) -> None:
    raise Terminated


def _one_line(error: Exception) -> str:
    """The message of an error; one that a loader's process raised is the last line of the traceback it sent."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].partition(": ")[2] if "Traceback (most recent call last)" in str(error) else " ".join(lines)


def guarded(name: str, command: Callable[[], None]) -> int:
    """Run a command and return its exit code; with AVGK_DEBUG=1 errors come with their traceback.

    Args:
        name: The command, for messages.
        command: What to do.
    """
    main_thread = threading.current_thread() is threading.main_thread()  # only there signals can be handled
    before = signal.signal(signal.SIGTERM, _terminate) if main_thread else None
    try:
        command()
    except KeyboardInterrupt as stop:
        print(f"\navgk {name}: {str(stop) or 'stopped.'}", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("AVGK_DEBUG"):
            raise
        print(f"avgk {name}: {_one_line(error)}", file=sys.stderr)
        return 2
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, before)
    return 0
