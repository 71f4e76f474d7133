"""Every block of the README runs."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from avgk_hf.cli import main
from conftest import save_vit

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SMALL = {
    '"resnet18"': '"test_resnet"',
    '"vit_small_patch16_224"': '"test_vit"',
    "pretrained=True": "pretrained=False",
    "google/vit-base-patch16-224": "vit",
}


@pytest.fixture(scope="module")
def workplace(image_folder, tmp_path_factory):
    """A folder as the README assumes it: images, a picture, the recipes, and a classifier that others trained."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(image_folder, folder / "my_plants")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    shutil.copy(image_folder / "test" / "oak" / "0.png", folder / "image.jpg")
    save_vit(folder / "vit")
    return folder


def test_every_block_runs(workplace, monkeypatch, capsys):
    """In order, with tiny backbones in place of those whose weights need a download, and on small data."""
    monkeypatch.chdir(workplace)
    ran = []
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", README, flags=re.DOTALL):
        assert block.count("\n") < 25
        if language == "python":
            for name, small in SMALL.items():
                block = block.replace(name, small)
            exec(compile(block, "README.md", "exec"), {})
            ran.append("python")
            continue
        for line in block.splitlines():
            arguments = shlex.split(line, comments=True)
            if arguments[:1] != ["avgk"]:  # make, which installs
                continue
            arguments = ["my_plants" if a == "glyphs" else SMALL.get(a, a) for a in arguments[1:]]
            if arguments[0] in ("train", "sweep"):
                arguments += ["--dataset", "my_plants", "--num_train_epochs", "1", "--calibrate_k", "1", "2"]
            if arguments[0] == "app" and "--space" not in arguments:  # all but the server, which would not end
                arguments += ["--space", f"runs/app-{len(ran)}"]
            assert main(arguments) == 0, line
            ran.append(arguments[0])
    assert ran.count("python") >= 6 and {"train", "sweep", "report", "evaluate", "calibrate", "plot"} <= set(ran)
    assert (workplace / "runs/plants/config.json").is_file() and "'label'" in capsys.readouterr().out


def test_every_command_is_in_the_table():
    from avgk_hf.cli import COMMANDS

    table = set(re.findall(r"^\| `avgk (\w+)", README, flags=re.MULTILINE))
    assert table == set(COMMANDS)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()
