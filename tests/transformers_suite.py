"""transformers' own tests of models and configurations, from the source distribution of the installed version.

The wheel lacks them. pip fetches the source distribution by name, once for each version, and the two files that are
needed stay in the user's cache folder, outside the checkout.
"""

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


def load_suite():
    """The modules of `FILES`; skips the test file that calls it where they cannot be had."""
    pytest.importorskip("parameterized", reason="transformers' tests need it: `pip install parameterized`")
    version = transformers.__version__
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "avgk_hf"
    folder = cache / f"transformers-{version}"
    if not folder.is_dir():
        try:
            fetch(version, folder)
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            pytest.skip(
                f"transformers' own tests were not run: pip could not fetch the source distribution of transformers"
                f" {version}, which holds them ({reason}).",
                allow_module_level=True,
            )
    for name, content in STUBS.items():
        module = sys.modules[f"transformers_tests.{name}"] = types.ModuleType(name)
        vars(module).update(content)
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)  # transformers registers its own marks
            return [importlib.import_module(f"transformers_tests.{Path(name).stem}") for name in FILES]
    finally:
        sys.path.remove(str(folder))


def fetch(version, folder):
    """Make `folder` with a package `transformers_tests` of the files of this version."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        command += ["--retries", "1", "--dest", temporary, f"transformers=={version}"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
        package = Path(temporary) / "unpacked" / "transformers_tests"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        with tarfile.open(Path(temporary) / f"transformers-{version}.tar.gz") as archive:
            for name in FILES:
                (package / name).write_bytes(archive.extractfile(f"transformers-{version}/tests/{name}").read())
        if not folder.is_dir():  # another run may have been faster
            package.parent.rename(folder)
