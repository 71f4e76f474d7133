"""Every block of the README runs."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from avgk_hf.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run(image_folder, tmp_path, monkeypatch, capsys):
    """With a tiny backbone in place of resnet18, whose pretrained weights need a download."""
    shutil.copytree(image_folder, tmp_path / "my_plants")
    monkeypatch.chdir(tmp_path)
    assert blocks("python")
    for block in blocks("python"):
        assert block.count("\n") < 25
        small = block.replace('"resnet18"', '"test_resnet"').replace("pretrained=True", "pretrained=False")
        exec(compile(small, "README.md", "exec"), {})
    assert "'oak'" in capsys.readouterr().out or (tmp_path / "runs/plants/config.json").is_file()


def test_avgk_commands_run(image_folder, tmp_path, monkeypatch):
    """On small data in place of glyphs, and for two steps."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("avgk ")]
    assert len(lines) >= 3
    for line in lines:
        arguments = shlex.split(line, comments=True)[1:]
        arguments = [str(image_folder) if a == "glyphs" else a for a in arguments]
        if arguments[0] == "train":
            arguments += ["--dataset", str(image_folder), "--num_train_epochs", "1", "--calibrate_k", "1", "2"]
        assert main(arguments) == 0, line


def test_every_command_is_in_the_table():
    from avgk_hf.cli import COMMANDS

    table = set(re.findall(r"^\| `avgk (\w+)", README, flags=re.MULTILINE))
    assert table == set(COMMANDS)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()
