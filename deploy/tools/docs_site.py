"""MkDocs hooks for the site of docs/ (mkdocs.yml). A warning here stops `make docs`, because the build is strict.

- A link from a document to a file outside docs/ works on GitHub. On the site it leads to a page that shows the file.
- Lists, code blocks and tables must come out as on GitHub. Python-Markdown wants four spaces inside a list item.
- Nothing may be loaded from another host.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
# The folder of the site that shows source files.
SHOWN = "source"
# The target of a Markdown link or image, without its anchor and title.
LINK = re.compile(r"(?<=\]\()(?![a-z][a-z0-9+.-]*:|[#/])([^)\s#]+)")
# Addresses that a page loads by itself: scripts, images, style sheets, fonts.
FOREIGN = re.compile(r"""(?:\bsrc=|<link\b[^>]*\bhref=|\burl\(|@import\s)["']?((?:https?:)?//[^"'\s>)]+)""")
# Elements that are counted on both renderings of a page.
COUNTED = ("li", "pre", "table", "blockquote")
IMAGES = (".png", ".svg")
LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}

log = logging.getLogger("mkdocs.hooks.docs_site")


def place_on_site(path: str) -> str:
    """Return the place under docs/ at which the site has a file of the repository."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    return f"{SHOWN}/{path}" if path.endswith((".md", *IMAGES)) else f"{SHOWN}/{path}.md"


def outside_targets(text: str, path: str) -> set[str]:
    """Return the files outside docs/ that the document `path` links to."""
    found = {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in LINK.findall(text)}
    return {each for each in found if not each.startswith(f"{DOCS}/") and (ROOT / each).is_file()}


def with_site_links(text: str, path: str) -> str:
    """Return the document `path` with links that work on the site."""
    here = posixpath.dirname(place_on_site(path)) or "."

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        # MkDocs warns of a target that does not exist.
        return posixpath.relpath(place_on_site(target), here) if (ROOT / target).is_file() else match[1]

    return LINK.sub(replaced, text)


def shown(path: str) -> str | bytes:
    """Return the Markdown of the page that shows a file outside docs/, or an image itself."""
    if path.endswith(IMAGES):
        return (ROOT / path).read_bytes()
    text = (ROOT / path).read_text("utf-8")
    unsearched = "---\nsearch:\n  exclude: true\n---\n\n"
    if path.endswith(".md"):
        return unsearched + with_site_links(text, path)
    fence = "`" * 6
    return f"{unsearched}# {path}\n\n{fence}{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each document at the root, whose links are then checked, and for each file that is linked to."""
    seen = {f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()}
    waiting = {path.name for path in ROOT.glob("*.md")}
    for path in seen:
        waiting |= outside_targets((ROOT / path).read_text("utf-8"), path)
    while waiting:
        path = min(waiting)
        seen.add(path)
        place = place_on_site(path)
        files.append(File.generated(config, place, content=shown(path), inclusion=InclusionLevel.NOT_IN_NAV))
        if path.endswith(".md"):
            waiting |= outside_targets((ROOT / path).read_text("utf-8"), path)
        waiting -= seen
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Make a document's links to source files lead to their pages."""
    return markdown if page.file.generated_by else with_site_links(markdown, f"{DOCS}/{page.file.src_uri}")


def counts(html: str) -> dict[str, int]:
    """Return how many of the counted elements a page has."""
    return {name: len(re.findall(rf"<{name}\b", html)) for name in COUNTED}


def on_page_content(html: str, *, page: Page, **_: Any) -> None:
    """Warn of a page that has other lists, code blocks or tables than on GitHub, which follows CommonMark."""
    expected = counts(MarkdownIt("commonmark").enable("table").render(page.markdown or ""))
    for name, found in counts(html).items():
        if found != expected[name]:
            log.warning("%s has %d <%s>, %d on GitHub", page.file.src_uri, found, name, expected[name])


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of each page or style sheet that loads something from another host."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            for url in sorted(set(FOREIGN.findall(path.read_text("utf-8")))):
                log.warning("%s loads %s", path.relative_to(config.site_dir), url)
