"""deploy/tools/docs_site.py: links of documents on the site."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from tests.scripts import loaded
from tests.test_house import ROOT


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    pytest.importorskip("mkdocs")
    with loaded(ROOT / "deploy/tools/docs_site.py") as module:
        yield module


@pytest.mark.parametrize(
    ("path", "link", "expected"),
    [
        ("docs/start.md", "serving.md#flags", "serving.md#flags"),
        ("docs/start.md", "../Makefile", "source/Makefile.md"),
        (
            "docs/concepts/exchange.md",
            "../../worker/moeyard_worker/wire.py",
            "../source/worker/moeyard_worker/wire.py.md",
        ),
        ("docs/start.md", "../CONTRIBUTING.md#tests", "source/CONTRIBUTING.md#tests"),
        ("CONTRIBUTING.md", "docs/metrics.md", "../metrics.md"),
        ("docs/start.md", "../absent.py", "../absent.py"),
        ("docs/start.md", "https://example.com/a.md", "https://example.com/a.md"),
    ],
)
def test_links_lead_to_pages_of_the_site(site: ModuleType, path: str, link: str, expected: str) -> None:
    text = f"before [name]({link}) after"
    assert site.with_site_links(text, path) == text.replace(link, expected)


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ('<script src="https://example.com/a.js">', ["https://example.com/a.js"]),
        ('<link rel="stylesheet" href="//example.com/a.css">', ["//example.com/a.css"]),
        ("@font-face{src:url(https://example.com/a.woff2)}", ["https://example.com/a.woff2"]),
        ('<a href="https://example.com/">', []),
        ('<link rel="stylesheet" href="assets/a.css"><script src="../b.js">', []),
    ],
)
def test_assets_of_other_hosts_are_found(site: ModuleType, text: str, urls: list[str]) -> None:
    assert site.FOREIGN.findall(text) == urls


def test_a_page_that_comes_out_otherwise_than_on_github_is_found(site: ModuleType) -> None:
    github = site.MarkdownIt("commonmark").enable("table").render("- item\n\n      code\n\n| a |\n|---|\n| b |\n")
    assert site.counts(github) == {"li": 1, "pre": 1, "table": 1, "blockquote": 0}
