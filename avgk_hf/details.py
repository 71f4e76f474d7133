"""calibration.json: what of a calibration grows with the classes, beside config.json.

Like the model, this file travels with a saved model as remote code.
"""

import json
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from .calibration import DETAILS, Calibration
from .checks import check_counts, read_json, same_labels
from .files import write_text
from .records import FILE

HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")  # where a file is


def save_details(config: Any, folder: str | Path) -> None:
    """Write calibration.json beside config.json, or remove one that is out of date."""
    path, record = Path(folder, FILE), getattr(config, "calibration", None) or {}
    found = {name: record[name] for name in DETAILS if record.get(name)}
    if getattr(config, "train_counts", None):
        found["train_counts"] = config.train_counts
    if found:
        write_text(path, json.dumps({"num_labels": config.num_labels, **found}) + "\n")
    else:
        path.unlink(missing_ok=True)


def load_details(config: Any, name: str | Path, /, **hub: Any) -> None:
    """Add what calibration.json holds to the config, if it and config.json beside it are of the same classes.

    Args:
        config: What config.json gave.
        name: Folder or Hub id.
        hub: Where on the Hub, as `from_pretrained` takes it; other arguments are left out.
    """
    if set(DETAILS) & set(getattr(config, "calibration", None) or ()):  # loaded before
        return
    where = {key: value for key, value in hub.items() if key in HUB and value is not None}
    if Path(name).is_dir():
        path = Path(name, where.get("subfolder", ""), FILE)
        path = path if path.is_file() else None
    else:
        silent = ("missing_entries", "connection_errors", "gated_repo")
        path = cached_file(str(name), FILE, **{f"_raise_exceptions_for_{case}": False for case in silent}, **where)
    if path is None:
        return
    found, beside = read_json(Path(path)), Path(path).with_name("config.json")
    labels = read_json(beside).get("id2label") if beside.is_file() else None
    if found.get("num_labels") != config.num_labels or not same_labels(labels or config.id2label, config.id2label):
        return
    unknown = set(found) - {"num_labels", "train_counts", *DETAILS}
    if unknown:
        raise ValueError(f"{path} has the unknown field {sorted(unknown)[0]!r}: calibrate again.")
    if "train_counts" in found:
        config.train_counts = check_counts(f"{path}: train_counts", found["train_counts"], config.num_labels)
    if getattr(config, "calibration", None) is not None:
        config.calibration = {**config.calibration, **{name: found[name] for name in DETAILS if name in found}}
    try:
        Calibration.of(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
