"""After `import avgk_hf` transformers and timm know its models, in whatever order they are imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from avgk_hf.calibration import Calibration

LIGHT = "import sys, avgk_hf\nassert not HEAVY & set(sys.modules)\n"
TIMM = "assert timm.create_model('densenet40_40_cifar', num_classes=3).num_classes == 3\n"
PIPELINE = "assert type(pipeline('average-k-image-classification', FOLDER).model).__module__ == 'avgk_hf.modeling'\n"
MODEL = "assert type(AutoModelForImageClassification.from_pretrained(FOLDER)).__module__ == 'avgk_hf.modeling'\n"
LOADERS = (
    "import importlib.machinery\n"
    "for name in ('transformers', 'transformers.models.auto.configuration_auto', 'timm', 'avgk_hf.modeling'):\n"
    "    assert type(sys.modules[name].__spec__.loader) is importlib.machinery.SourceFileLoader\n"
)
ORDERS = {
    "ours, transformers": LIGHT + "from transformers import pipeline\n" + PIPELINE + LOADERS,
    "transformers, ours": "from transformers import pipeline\nimport avgk_hf\n" + PIPELINE,
    "ours, timm": LIGHT + "import timm\nassert 'transformers' not in sys.modules\n" + TIMM,
    "timm, ours, transformers": "import timm, avgk_hf\n"
    + TIMM
    + "from transformers import AutoModelForImageClassification\n"
    + MODEL,
    "a module of ours, Auto class": "import avgk_hf.configuration\n"
    "from transformers import AutoConfig\nassert AutoConfig.from_pretrained(FOLDER).model_type == 'avgk'\n",
    "Auto class asked of the lazy module": "import transformers, avgk_hf\n"
    "assert transformers.AutoConfig.from_pretrained(FOLDER).model_type == 'avgk'\n",
    "reloaded, and behind it another finder": LIGHT + "import importlib, importlib.machinery\n"
    "class Finder(importlib.machinery.PathFinder): pass\n"
    "sys.meta_path.append(Finder)\n"
    "for module in (avgk_hf, avgk_hf.auto): importlib.reload(module)\n"
    "assert sys.meta_path.count(avgk_hf.auto) == 1\n"
    "import timm\n"
    + TIMM
    + "importlib.reload(timm)\nimportlib.reload(avgk_hf.auto)\n"
    + TIMM
    + "from transformers import pipeline\n"
    + PIPELINE
    + LOADERS,
    "what registering needs is missing at first": LIGHT + "import warnings\n"
    "sys.modules['safetensors.torch'] = None\n"
    "with warnings.catch_warnings(record=True) as said: import transformers.models.auto.configuration_auto\n"
    "assert 'transformers does not know avgk_hf' in str(said[0].message)\n"
    "del sys.modules['safetensors.torch']\n"
    "from transformers import AutoModelForImageClassification\n" + MODEL,
    "a thread": LIGHT + "import threading\n"
    "thread = threading.Thread(target=lambda: __import__('timm') and __import__('transformers').AutoConfig)\n"
    "thread.start()\nthread.join()\nassert not avgk_hf.auto.WAITING\n"
    "import timm\n" + TIMM + "from transformers import AutoModelForImageClassification\n" + MODEL,
    "a library that imports Auto classes": "import avgk_hf, peft\n"
    "from transformers import AutoModelForImageClassification\n" + MODEL,
}


RARE = ["a thread", "a library that imports Auto classes", "reloaded, and behind it another finder"]
RARE += ["what registering needs is missing at first", "Auto class asked of the lazy module"]


@pytest.mark.parametrize(
    "program",
    [pytest.param(code, id=name, marks=[pytest.mark.long] * (name in RARE)) for name, code in ORDERS.items()],
)
def test_every_order_of_imports(program, make_model, fresh, tmp_path):
    if "FOLDER" in program:
        model = make_model()
        Calibration.store(model.config, {2: 0.0}, {})
        model.save_pretrained(tmp_path)
    heavy = {"transformers", "timm", "datasets", "safetensors"}
    done = fresh.run(f"FOLDER, HEAVY = {str(tmp_path)!r}, {heavy}\n{program}", folder=tmp_path)
    assert done.code == 0, done.err


def test_importing_the_package_imports_nothing_heavy():
    heavy = {"torch", "transformers", "timm", "datasets", "numpy", "huggingface_hub"}
    subprocess.run([sys.executable, "-c", f"HEAVY = {heavy}\n{LIGHT}"], check=True)


def test_public_names_are_no_modules():
    """`calibrate` was a module once, and the import of one would replace the function."""
    import avgk_hf.commands.calibrate
    import avgk_hf.evaluation

    assert avgk_hf.calibrate is avgk_hf.evaluation.calibrate and callable(avgk_hf.load_classifier)
    assert not {path.stem for path in Path(avgk_hf.__file__).parent.iterdir()} & set(avgk_hf.__all__)
