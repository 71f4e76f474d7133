"""How mkdocs makes pages of this repository's own Markdown files, so that no text is kept twice."""

import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import avgk_hf

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "recipes/glyphs/README.md": "glyphs.md",
    "recipes/cifar100/README.md": "cifar100.md",
    "recipes/plantnet300k/README.md": "plantnet300k.md",
    "recipes/cub200/README.md": "cub200.md",
    "recipes/folder/README.md": "folder.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
REFERENCE = """\
# Public names

All of them can be imported from `avgk_hf`. What else is useful is under [Modules](modules.md).

"""


class Examples(griffe.Extension):
    """Read our `Example:` as the section that griffe calls `Examples:`, so that its code is shown as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for everything that is found in the sources."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `PAGES` with the pictures in them, and the reference of the public names."""
    own = {f"docs/{path.name}": path.name for path in DOCS.glob("*.md")}
    for source, page in {**own, **PAGES}.items():  # of our own pages, too, links may lead out of docs/
        if (there := files.get_file_from_path(page)) is not None:
            files.remove(there)
        files.append(File.generated(config, page, content=site_page(source, files, config)))
    names = [f"::: avgk_hf.{module}.{name}\n" for name, module in avgk_hf._WHERE.items()]
    files.append(File.generated(config, "reference.md", content=REFERENCE + "\n".join(names)))
    return files


def site_page(source: str, files: Files, config: MkDocsConfig) -> str:
    """A Markdown file with links that lead to pages of the site; those to other files become plain text."""

    def moved(link: re.Match) -> str:
        picture, text, target, anchor = link.groups()
        path = Path(os.path.normpath(ROOT / Path(source).parent / target))
        place = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if not path.exists() or not place:
            return link[0]  # mkdocs complains
        if place in PAGES:
            return f"[{text}]({PAGES[place]}{anchor or ''})"
        if path.is_relative_to(DOCS):
            return f"{picture}[{text}]({path.relative_to(DOCS).as_posix()})"
        if not picture:
            return text if "`" in text or text != place else f"`{text}`"
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(path)))
        return f"![{text}]({place})"

    folder_pages = {page.removesuffix("/README.md"): page for page in PAGES}
    text = (ROOT / source).read_text(encoding="utf-8")
    for folder, page in folder_pages.items():  # a link to a folder is one to its README
        if folder != page:
            text = text.replace(f"]({folder})", f"]({page})")
    return LINK.sub(moved, text)
