"""Every block of the README and of the pages in docs/ runs, and each page begins and ends as the others do."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from avgk_hf.cli import COMMANDS, main
from conftest import save_vit

ROOT = Path(__file__).parent.parent
# in the order in which a reader would come to them: what an earlier one wrote, later ones use
PAGES = ["README.md"] + [
    f"docs/{name}.md"
    for name in (
        *("photographs", "existing", "python", "recipes", "sweeps", "heads", "coverage", "drift", "deploy", "page"),
        *("metric", "losses", "which_loss", "processes", "threshold", "study", "faults", "commands"),
        *("choose_k", "hosting"),
    )
]
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
SMALL = {
    '"resnet18"': '"test_resnet"',
    '"vit_small_patch16_224"': '"test_vit"',
    "pretrained=True": "pretrained=False",
    "image_size=128": "image_size=32",
}
QUICK = ["--model", "test_resnet", "--image_size", "32", "--pretrained", "false", "--dataset", "my_plants"]
QUICK += ["--num_train_epochs", "1", "--dataloader_num_workers", "0", "--calibrate_k", "1", "2", "5"]


@pytest.fixture(scope="module")
def workplace(image_folder, tmp_path_factory):
    """A folder as the pages assume it: images, a picture, the recipes, and a classifier that others trained."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(image_folder, folder / "my_plants")
    shutil.copytree(image_folder, folder / "field_labelled")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    shutil.copy(image_folder / "test" / "oak" / "0.png", folder / "image.jpg")
    save_vit(folder / "my_classifier")
    return folder


def commands_of(block: str) -> list[list[str]]:
    """The lines of `avgk` as a small machine runs them; the others install, or are run by test_processes.py."""
    found = []
    for line in block.splitlines():
        arguments = shlex.split(line, comments=True)
        if arguments[:1] != ["avgk"]:
            assert arguments[:1] in (["make"], ["pip"], ["accelerate"]), line
            continue
        # there are six classes only, so no K = 10
        arguments = ["my_plants" if a == "glyphs" else a for a in arguments[1:] if a != "10"]
        if arguments[0] in ("train", "sweep") and "--help" not in arguments:
            arguments += QUICK
        if arguments[0] == "app" and "--space" not in arguments:  # all but the server, which would not end
            arguments += ["--space", f"runs/app-{len(arguments)}"]
        found.append(arguments)
    return found


def test_every_block_runs(workplace, monkeypatch, capsys):
    """In order, with tiny backbones in place of those whose weights need a download, on small data, and once each."""
    monkeypatch.chdir(workplace)
    ran = []
    for page, text in TEXT.items():
        for language, block in re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL):
            assert block.count("\n") < 25 and language in ("python", "bash", "yaml", "bibtex", "nginx"), page
            if language == "python":
                for name, small in SMALL.items():
                    block = block.replace(name, small)
                exec(compile(block, page, "exec"), {})
                ran.append(["python"])
            for arguments in commands_of(block) if language == "bash" else ():
                if arguments not in ran:
                    assert main(arguments) == 0, (page, arguments)
                    ran.append(arguments)
    names = [arguments[0] for arguments in ran]
    assert names.count("python") >= 8
    assert set(names) >= {"check", "init", "train", "info", "sweep", "report", "evaluate", "calibrate", "plot", "app"}
    assert (workplace / "runs/plants/config.json").is_file() and "'label'" in capsys.readouterr().out


def test_the_folder_of_the_python_example_is_taken_by_every_command(workplace, monkeypatch, capsys):
    """It is what `trainer.evaluate(test)` and `trainer.save_model()` wrote, without `avgk train`."""
    if not (workplace / "runs/python").exists():
        pytest.skip("the test before did not run")
    monkeypatch.chdir(workplace)
    for command in ("card", "report", "info"):
        assert main([command, "runs/python"]) == 0
    assert "average-K accuracy" in Path("runs/python/README.md").read_text()
    assert main(["plot", "runs/python", "--out", "runs/python-plots"]) == 0
    assert Path("runs/python-plots/contact_sheet_python.png").is_file()
    assert main(["evaluate", "runs/python", "my_plants"]) == 0
    assert main(["calibrate", "runs/python", "my_plants", "--k", "1", "3"]) == 0


def test_the_readme_is_short():
    assert len(TEXT["README.md"].splitlines()) <= 150
    first = TEXT["README.md"].splitlines()[:30]
    assert any("docs/which_loss.md" in line for line in first) and "## What to expect" in first


@pytest.mark.parametrize("page", PAGES[1:])
def test_pages_begin_with_the_command_and_end_in_short(page):
    text = TEXT[page]
    assert re.search(r"\n## In short\n\n(- .*\n(  .*\n)*)+\Z", text), page
    if "choose_k" not in page:  # which begins with what K is
        assert re.match(r"# .+\n\n([^#]*\n\n)?```(bash|python)\n", text), page


def test_every_page_is_listed():
    """In the README's table, and either among those that run here or among those that hold no blocks to run."""
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert pages == {*PAGES[1:], "docs/modules.md", "docs/trainer.md"}
    for page in pages - {"docs/modules.md"}:
        assert f"({page})" in TEXT["README.md"], page


def test_every_command_is_in_the_table():
    table = set(re.findall(r"^\| `avgk (\w+)", TEXT["docs/commands.md"], flags=re.MULTILINE))
    assert table == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT[page]):
        assert ((ROOT / page).parent / target).exists(), target
