"""Every chapter runs in the fast setting, in time, and also alone with only the wheel."""

from __future__ import annotations

import os
import shutil
import zipfile

import nbformat
import pytest

import build

# On two quiet cores, nothing measured before. Runners of a CI service are neither quiet nor all
# alike: they fail a chapter that takes twice as long.
SECONDS = 180 * (2 if os.environ.get("CI") else 1)


@pytest.mark.parametrize("chapter", build.chapters())
def test_chapter(chapter, run_chapter, slow_ok):
    run = run_chapter(chapter)
    assert run.path.is_file()
    print(f"{chapter}: {run.seconds:.0f} s")
    assert slow_ok or run.seconds <= SECONDS, (
        f"{chapter} took {run.seconds:.0f} s, more than {SECONDS} s; "
        "on a busy machine set CSLOC_SLOW_OK=1"
    )


@pytest.mark.parametrize("chapter", build.chapters())
def test_chapter_alone_with_the_wheel(chapter, run_chapter, cache, wheel, tmp_path):
    """As in Colab: the notebook alone in a folder, the package from its wheel, no checkout."""
    run_chapter(chapter)  # what it measured is stored, so this run need not measure it again
    site, folder = tmp_path / "site", tmp_path / "empty"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    folder.mkdir()
    source = folder / f"{chapter}.ipynb"
    shutil.copy(build.ROOT / "notebooks" / source.name, source)
    notebook = nbformat.read(source, as_version=4)
    where = "import csloc_utils\n\nprint(csloc_utils.__file__)"
    notebook.cells.append(nbformat.v4.new_code_cell(where))
    nbformat.write(notebook, source)

    target = tmp_path / "done.ipynb"
    env = {**cache, "PYTHONPATH": str(site)}
    build.run_notebook(source, target, build.FAST, cwd=folder, env=env)

    (said,) = nbformat.read(target, as_version=4).cells[-1].outputs
    assert said.text.startswith(str(site)), "the chapter ran with the checkout, not the wheel"
