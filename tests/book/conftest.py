"""Every chapter runs once for all tests of a session, with a store of measurements of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))

import build  # noqa: E402


@pytest.fixture(scope="session")
def cache() -> dict[str, str]:
    """Environment of the chapters: the user's converted models, but no earlier measurements.

    So a chapter is timed as a first reader would run it. Runs of one session share what they
    measure.
    """
    from csloc_utils.sources import cache_folder

    folder = build.BUILD / "cache"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    models = cache_folder().resolve() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models, target_is_directory=True)
    return {"CSLOC_CACHE": str(folder)}


@pytest.fixture(scope="session")
def run_chapter(cache: dict[str, str]) -> Callable[[str], build.Run]:
    """Run a chapter on the first call; later calls get the same run, or the same failure."""
    runs: dict[str, build.Run | build.BookError] = {}

    def run(chapter: str) -> build.Run:
        if chapter not in runs:
            try:
                runs[chapter] = build.execute(chapter, reuse=False, env=cache)
            except build.BookError as error:
                runs[chapter] = error
        result = runs[chapter]
        if isinstance(result, build.BookError):
            pytest.fail(str(result), pytrace=False)
        return result

    return run


@pytest.fixture(scope="session")
def executed(run_chapter: Callable[[str], build.Run]) -> dict[str, Path]:
    """Every chapter's executed notebook."""
    return {chapter: run_chapter(chapter).path for chapter in build.chapters()}


@pytest.fixture(scope="session")
def repository() -> str | None:
    """Address for which `site` is built: what is known here, as `make book` would find it."""
    return build.repository_url()


@pytest.fixture(scope="session")
def site(executed: dict[str, Path], repository: str | None) -> Path:
    """Folder of the pages, built from this session's runs."""
    build.stage(executed, repository, build.BUILD / "src")
    return build.build_html(build.BUILD / "src", ROOT)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build.command(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        + ["--wheel-dir", str(folder), str(ROOT)]
    )
    (path,) = folder.glob("csloc-*.whl")
    return path


@pytest.fixture(scope="session")
def slow_ok() -> bool:
    """Whether time limits are off (``CSLOC_SLOW_OK``), for machines that are busy or slow."""
    return bool(os.environ.get("CSLOC_SLOW_OK"))
