"""transformers' own tests of models and configurations, from the source distribution of the installed version.

The wheel lacks them. The source distribution is fetched as a file, once for each version, and stays in the user's
cache folder, outside the checkout. It is taken only with the hash that is stated here, and two files are read from it;
nothing is built or installed.
"""

import hashlib
import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import types
import warnings
from pathlib import Path

import pytest
import transformers

FILES = ("test_modeling_common.py", "test_configuration_common.py")
# {version: SHA-256 of its source distribution}; the suite of another version is skipped until its hash is added
HASHES = {
    "5.22.2": "55f57e5cbd7c0b500b7a706daa0ecd76567b56ca139e6e02ef0bba0437e3a763",
    "5.23.0": "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
}
# what these two files import from test files that the source distribution lacks
STUBS = {
    "exporters.test_export": {"ExportTesterMixin": object},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "return_dict": False,
            "output_hidden_states": True,
            "dtype": "float16",
            "architectures": ["AvgKForImageClassification"],
            "id2label": {0: "oak", 1: "elm", 2: "ash"},
            "label2id": {"oak": 0, "elm": 1, "ash": 2},
            "problem_type": "single_label_classification",
        }
    },
}


_unpacked = tempfile.TemporaryDirectory(prefix="transformers_tests")  # until the tests have ended


def load_suite():
    """The modules of `FILES`; skips the test file that calls it where they cannot be had."""
    pytest.importorskip("parameterized", reason="transformers' tests need it: `pip install parameterized`")
    version = transformers.__version__
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "avgk_hf"
    try:
        unpack(archive(version, cache), version, Path(_unpacked.name))
    except (OSError, LookupError, ValueError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        pytest.skip(
            f"transformers' own tests were not run: the source distribution of transformers {version}, which holds"
            f" them, could not be taken ({reason}).",
            allow_module_level=True,
        )
    for name, content in STUBS.items():
        module = sys.modules[f"transformers_tests.{name}"] = types.ModuleType(name)
        vars(module).update(content)
    sys.path.insert(0, _unpacked.name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)  # transformers registers its own marks
            return [importlib.import_module(f"transformers_tests.{Path(name).stem}") for name in FILES]
    finally:
        sys.path.remove(_unpacked.name)


def archive(version, cache):
    """The source distribution in the cache, fetched where it is missing; ValueError for one with another hash."""
    if version not in HASHES:
        raise ValueError(f"HASHES in tests/transformers_suite.py states none for {version}")
    path = cache / f"transformers-{version}.tar.gz"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            new = Path(temporary) / path.name
            fetch = [sys.executable, str(Path(__file__).with_name("sdist.py")), "transformers", version, str(new)]
            subprocess.run(fetch, check=True, capture_output=True, text=True, timeout=240)
            check(new, HASHES[version])
            new.replace(path)
    check(path, HASHES[version])  # whoever put it there
    return path


def check(path, expected):
    """Refuse a file with another SHA-256."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise ValueError(f"{path.name} has the SHA-256 {found}, not {expected}: remove {path}")


def unpack(path, version, folder):
    """Write the package `transformers_tests` of the two files to a folder."""
    package = folder / "transformers_tests"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    with tarfile.open(path) as opened:
        for name in FILES:
            member = opened.extractfile(f"transformers-{version}/tests/{name}")
            (package / name).write_bytes(member.read())
