"""The built pages: complete, free of errors, whole without a network, links that lead somewhere."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup

import build

RESOURCES = {"script": "src", "img": "src", "iframe": "src", "source": "src", "embed": "src"}


@lru_cache
def soup(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf8"), "html.parser")


@lru_cache
def anchors(path: Path) -> set[str]:
    return {tag["id"] for tag in soup(path).find_all(id=True)}


@pytest.fixture(scope="module")
def html(site) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def test_pages_and_figures_exist(site, executed):
    """brainhack_jupyter_book #201: for months a green build silently produced no HTML."""
    for page in build.pages():
        text = soup(site / f"{page}.html").find("article").get_text()
        assert len(text) > 500, f"{page} is nearly empty"
    for chapter in executed:
        page = site / "notebooks" / f"{chapter}.html"
        figures = soup(page).select("figure img")
        assert figures, f"{chapter} shows no figure"
        for image in figures:
            assert (page.parent / unquote(image["src"])).stat().st_size > 1000
    assert (site / "index.html").is_file()


def test_every_image_of_a_chapter_is_a_figure(executed):
    for chapter, path in executed.items():
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", ()):
                if any(kind.startswith("image/") for kind in output.get("data", ())):
                    assert cell.metadata.get("mystnb", {}).get("figure"), (
                        f"{chapter}: an image without name, caption and alt text: {cell.source}"
                    )


def test_no_errors_are_published(html):
    for path in html:
        assert not soup(path).select(".output.traceback, .output.stderr, .system-message"), path
        assert "Traceback (most recent call last)" not in soup(path).get_text(), path


def test_no_path_of_this_machine_is_published(html):
    for path in html:
        text = path.read_text(encoding="utf8")
        assert str(build.ROOT) not in text, path
        assert not re.search(r"site-packages|/home/\w|/Users/\w", text), path


def test_nothing_is_loaded_from_elsewhere(site, html):
    for path in html:
        for tag in soup(path).find_all([*RESOURCES, "link"]):
            if tag.name == "link":
                address = tag.get("href", "") if tag.get("rel") != ["canonical"] else ""
            else:
                address = tag.get(RESOURCES[tag.name], "")
            assert not re.match(r"(https?:)?//", address), f"{path} loads {address}"
        for script in soup(path).find_all("script", src=False):
            assert "http" not in script.get_text(), f"{path}: {script.get_text()[:200]}"
    for style in (site / "_static").rglob("*.css"):
        text = style.read_text(encoding="utf8")
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", text), style


def test_mathematics_is_drawn_by_our_own_copy(site, html):
    for path in html:
        if soup(path).select(".math"):
            sources = [tag["src"] for tag in soup(path).find_all("script", src=True)]
            mathjax = [source for source in sources if "mathjax" in source]
            assert len(mathjax) == 1, path
            assert (path.parent / mathjax[0].split("?")[0]).resolve().is_file()


def test_inline_scripts_come_once(html):
    for path in html:
        scripts = [tag.get_text().strip() for tag in soup(path).find_all("script", src=False)]
        repeated = {text for text in scripts if scripts.count(text) > 1}
        # The theme switches its mode three times with one line; it declares nothing.
        assert not [text for text in repeated if re.search(r"^\s*(const|let) ", text)], path


def test_every_image_is_described(site):
    for path in (site / f"{page}.html" for page in build.pages()):
        for image in soup(path).find_all("img"):
            alt = image.get("alt", "")
            assert len(alt) > 15, f"{path}: {image}"
            assert not re.search(r"\.(png|svg|jpe?g)$|_images/", alt), f"{path}: {alt}"


def test_links_lead_somewhere(site, html):
    broken = []
    for path in html:
        for tag in soup(path).find_all(["a", "link", "script", "img"]):
            address = tag.get("href") or tag.get("src") or ""
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or not address or address == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or not target.is_relative_to(site.resolve()):
                broken.append(f"{path.relative_to(site)}: {address}: no such file")
            elif parts.fragment and target.suffix == ".html" and tag.name == "a":
                if unquote(parts.fragment) not in anchors(target):
                    broken.append(f"{path.relative_to(site)}: {address}: no such anchor")
    assert not broken, "\n".join(sorted(set(broken)))


def test_downloads_are_the_chapters_as_written(site, executed):
    for chapter in executed:
        page = nbformat.read(site / "_sources" / "notebooks" / f"{chapter}.ipynb", as_version=4)
        written = nbformat.read(build.ROOT / "notebooks" / f"{chapter}.ipynb", as_version=4)
        assert [c.source for c in page.cells] == [c.source for c in written.cells]
        assert "papermill" not in page.metadata
