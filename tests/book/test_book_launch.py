"""Buttons that open a chapter in Colab: exact where the repository is known, else absent.

Without an address jupyter-book's own default silently leads to somebody else's repository.
"""

from __future__ import annotations

import pytest
from bs4 import BeautifulSoup

import build

EXAMPLE = "https://github.com/example-org/example.book"


def links(html, page):
    text = (html / f"{page}.html").read_text(encoding="utf8")
    return {tag["href"] for tag in BeautifulSoup(text, "html.parser").find_all("a", href=True)}


def check(html, repository):
    for page in build.pages():
        found = links(html, page)
        colab = {link for link in found if "colab.research" in link}
        ours = set()
        if repository and page.startswith("notebooks/"):
            path = repository.removeprefix("https://github.com/")
            ours = {f"https://colab.research.google.com/github/{path}/blob/main/{page}.ipynb"}
        assert colab == ours, page
        assert not [link for link in found if "executablebooks" in link or "mybinder" in link]
        issues = {link for link in found if "/issues/new" in link}
        assert all(link.startswith(f"{repository}/issues/new") for link in issues)
        assert bool(issues) == bool(repository)


def test_buttons_of_the_book(site, repository):
    check(site, repository)


def test_buttons_of_the_other_case(site, repository, executed, tmp_path):
    """The book built as if the address were known, or where it is known, as if it were not."""
    other = None if repository else EXAMPLE
    build.stage(executed, other, tmp_path / "src")
    check(build.build_html(tmp_path / "src", tmp_path), other)


@pytest.mark.parametrize(
    "remote",
    [
        "https://github.com/example-org/example.book",
        "https://github.com/example-org/example.book.git\n",
        "https://github.com/example-org/example.book/",
        "https://user:secret@github.com/example-org/example.book.git",
        "git@github.com:example-org/example.book.git",
        "ssh://git@github.com/example-org/example.book.git",
        "ssh://git@github.com:22/example-org/example.book",
    ],
)
def test_remotes_on_github(remote):
    assert build.github_url(remote) == EXAMPLE


@pytest.mark.parametrize(
    "remote",
    ["", "/srv/git/book.git", "../book", "file:///srv/book.git", "https://gitlab.com/org/book",
     "git@example.org:org/book.git", "https://github.com/org", "https://github.com.evil.org/a/b"],
)  # fmt: skip
def test_remotes_elsewhere(remote):
    assert build.github_url(remote) is None


def test_address_from_the_environment(monkeypatch):
    monkeypatch.setenv("BOOK_REPOSITORY_URL", f"{EXAMPLE}.git")
    assert build.repository_url() == EXAMPLE
    monkeypatch.setenv("BOOK_REPOSITORY_URL", "")
    assert build.repository_url() is None
    monkeypatch.setenv("BOOK_REPOSITORY_URL", "https://example.org/book")
    with pytest.raises(build.BookError, match="BOOK_REPOSITORY_URL"):
        build.repository_url()
