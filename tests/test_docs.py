"""The docs site builds without a warning, holds what it should, and loads nothing from elsewhere."""

import html
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import avgk_hf
from avgk_hf.cli import build_parser

ROOT = Path(__file__).parent.parent
PAGES = ("choose_k.md", "hosting.md", "rare_species.md", "results.md", "scale.md")
pytestmark = pytest.mark.long
GUIDE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in PAGES)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


class Loaded(HTMLParser):
    """The addresses that a browser fetches with a page, unlike those that it goes to when they are clicked."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed") and attrs.get("src"):
            self.addresses.append(attrs["src"])
        if tag == "link" and attrs.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(attrs["href"])


def test_every_public_name_is_in_the_reference(site):
    reference = (site / "reference.html").read_text(encoding="utf-8")
    for name in set(avgk_hf.__all__) - {"__version__"}:
        assert re.search(rf'id="avgk_hf\.[\w.]+\.{name}"', reference), name
    assert "&gt;&gt;&gt;" in reference  # examples are code


def test_readme_study_and_changes_are_pages(site):
    for page, source in ("index", "README.md"), ("glyphs", "recipes/glyphs/README.md"), ("changelog", "CHANGELOG.md"):
        text = (site / f"{page}.html").read_text(encoding="utf-8")
        shown = [re.sub("<[^>]+>", "", part) for part in re.findall("<h2.*?>(.*?)</h2>", text, flags=re.DOTALL)]
        written = re.findall(r"^## (.+)$", (ROOT / source).read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert [html.unescape(part).removesuffix("¶") for part in shown] == [part.replace("`", "") for part in written]
        assert written


def test_pages_load_only_files_of_the_site(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 10
    for page in pages:
        parser = Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        assert len(parser.addresses) > 3
        for address in parser.addresses:
            assert not re.match("(https?:)?//", address), f"{page.name} loads {address}"
            if page.name != "404.html":  # whose addresses begin at the root of a server
                assert (page.parent / address.partition("#")[0].partition("?")[0]).exists(), address
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8"))


def test_commands_of_the_guide_are_commands():
    lines = [line for block in re.findall(r"```bash\n(.*?)```", GUIDE, flags=re.DOTALL) for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.strip().startswith("avgk")]
    assert {command[0] for command in commands} >= {"calibrate", "evaluate", "plot", "app"}
    for command in commands:
        build_parser().parse_args(command)
