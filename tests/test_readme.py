"""Every block of the README and of the pages in docs/ runs, and each page begins and ends as the others do."""

import re
import shlex
import shutil
from pathlib import Path
from zlib import crc32

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
        *("choose_k", "hosting", "rare_species", "results", "scale"),
    )
]
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
SMALL = {
    '"resnet18"': '"test_resnet"',
    '"vit_small_patch16_224"': '"test_vit"',
    "pretrained=True": "pretrained=False",
    '"pretrained": True': '"pretrained": False',
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
    (folder / "new_photos").mkdir()
    for path in (image_folder / "test").glob("*/*.png"):
        shutil.copy(path, folder / "new_photos" / f"{path.parent.name} {path.name}")
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
            assert not arguments or arguments[:1] in (["make"], ["pip"], ["accelerate"]), line
            continue
        if arguments[1] == "compare":  # test_recipes.py plans it
            assert (ROOT / arguments[2]).is_file()
            continue
        # there are six classes only, so no K = 10
        arguments = ["my_plants" if a == "glyphs" else a for a in arguments[1:] if a != "10"]
        if arguments[0] in ("train", "sweep") and "--help" not in arguments:
            arguments += QUICK
            arguments += ["--seeds", "2"] * ("--seeds" in arguments and arguments[0] == "train")
        if arguments[0] == "app" and "--space" not in arguments:  # all but the server, which would not end
            arguments += ["--space", f"runs/app-{crc32(repr(arguments).encode())}"]
        found.append(arguments)
    return found


@pytest.fixture(scope="module")
def ran():
    """What was run in the workplace so far: pages, and commands."""
    return {"pages": [], "commands": []}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page, workplace, ran, monkeypatch, capsys):
    """With tiny backbones in place of those whose weights need a download, on small data, and every command once."""
    monkeypatch.chdir(workplace)
    for before in PAGES[: PAGES.index(page) + 1]:  # each counts on those before it, also when it is tested alone
        if before not in ran["pages"]:
            ran["pages"].append(before)
            run_blocks(before, ran["commands"])
    assert page != "README.md" or "'label'" in capsys.readouterr().out


def run_blocks(page, done):
    for language, block in re.findall(r"```(\w+)\n(.*?)```", TEXT[page], flags=re.DOTALL):
        assert block.count("\n") < 25 and language in ("python", "bash", "yaml", "bibtex", "nginx")
        if language == "python":
            for name, small in SMALL.items():
                block = block.replace(name, small)
            exec(compile(block, page, "exec"), {})
        for arguments in commands_of(block) if language == "bash" else ():
            if arguments not in done:
                assert main(arguments) == 0, arguments
                done.append(arguments)


def test_every_kind_of_command_ran(ran):
    if ran["pages"] != PAGES:
        pytest.skip("not all pages were run")
    left = set(COMMANDS) - {arguments[0] for arguments in ran["commands"]}
    assert left <= {"demo", "compare", "push", "card", "glyphs"}  # which have tests of their own, or are run below


def test_the_folder_of_the_python_example_is_taken_by_every_command(workplace, ran, monkeypatch):
    """It is what `trainer.evaluate(test)` and `trainer.save_model()` wrote, without `avgk train`."""
    monkeypatch.chdir(workplace)
    if "README.md" not in ran["pages"]:
        run_blocks("README.md", [])
    for command in ("card", "report", "info"):
        assert main([command, "runs/python"]) == 0
    assert "average-K accuracy" in Path("runs/python/README.md").read_text()
    assert main(["plot", "runs/python", "--out", "runs/python-plots"]) == 0
    assert Path("runs/python-plots/contact_sheet_python.png").is_file()
    tables = ["--per-species", "runs/python-species.csv", "--unsure", "3", "--unsure-out", "runs/python-unsure"]
    assert main(["evaluate", "runs/python", "my_plants", *tables]) == 0
    assert main(["predict", "runs/python", "my_plants/test", "--k", "2", "--out", "runs/python-sets.csv"]) == 0
    for file in ("species.csv", "species.png", "unsure/contact_sheet.png", "sets.csv"):
        assert Path(f"runs/python-{file}").is_file()
    assert main(["app", "runs/python", "--space", "runs/python-space"]) == 0
    assert main(["export", "runs/python", "--onnx", "--dataset", "my_plants"]) == 0
    assert main(["calibrate", "runs/python", "my_plants", "--k", "1", "3"]) == 0


def test_the_readme_is_short():
    assert len(TEXT["README.md"].splitlines()) <= 150
    first = TEXT["README.md"].splitlines()[:35]
    assert any("docs/which_loss.md" in line for line in first) and "## What to expect" in TEXT["README.md"]


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
