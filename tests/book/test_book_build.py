"""How the book is made: what counts as a change, what is taken out, what is refused."""

from __future__ import annotations

import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

import build


def notebook_file(path, *sources):
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    return path


def test_a_run_is_clean_and_takes_its_parameters(tmp_path):
    source = tmp_path / "chapter.ipynb"
    cells = [
        new_code_cell("FAST = False", metadata={"tags": ["parameters"]}),
        new_code_cell("print(FAST)"),
    ]
    nbformat.write(new_notebook(cells=cells), source)
    target = tmp_path / "out" / "chapter.ipynb"
    seconds = build.run_notebook(source, target, build.FAST, cwd=tmp_path)
    done = nbformat.read(target, as_version=4)
    assert seconds > 0
    assert [cell.source for cell in done.cells] == ["FAST = False", "print(FAST)"]
    assert done.cells[1].outputs[0].text == "True\n"
    assert "papermill" not in target.read_text()
    assert [path.name for path in target.parent.iterdir()] == ["chapter.ipynb"]


def test_figures_are_drawn_in_cells_whatever_the_backend_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    draw = "import matplotlib.pyplot as plt\n\nplt.plot([1, 2]);"
    source = notebook_file(tmp_path / "chapter.ipynb", draw)
    build.run_notebook(source, tmp_path / "done.ipynb", {}, cwd=tmp_path)
    (cell,) = nbformat.read(tmp_path / "done.ipynb", as_version=4).cells
    assert "image/png" in cell.outputs[0].data


def test_a_failing_chapter_is_no_chapter(tmp_path):
    source = notebook_file(tmp_path / "chapter.ipynb", "x = 1", "x / 0")
    target = tmp_path / "done.ipynb"
    with pytest.raises(build.BookError, match="(?s)chapter.*ZeroDivisionError"):
        build.run_notebook(source, target, {}, cwd=tmp_path)
    assert not target.exists()


def test_errors_that_did_not_stop_a_run_are_found():
    error = new_output("error", ename="ValueError", evalue="bad", traceback=[])
    printed = new_output("stream", name="stdout", text="Traceback (most recent call last):\n ...")
    cells = [new_code_cell("a", outputs=[error]), new_code_cell("b", outputs=[printed])]
    assert build.failures(new_notebook(cells=cells)) == [
        "cell 0 ended in ValueError: bad",
        "cell 1 printed a traceback",
    ]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project, with a runner that only counts."""
    for folder in ("notebooks", "csloc_utils", "data"):
        (tmp_path / folder).mkdir()
    notebook_file(tmp_path / "notebooks" / "01.ipynb", "1")
    for name in ("requirements.txt", "pyproject.toml", "csloc_utils/a.py", "data/t.jsonl"):
        (tmp_path / name).write_text("one")
    runs = []

    def run(source, target, parameters, **_):
        runs.append(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        return 1.0

    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "BUILD", tmp_path / "_build")
    monkeypatch.setattr(build, "run_notebook", run)
    return tmp_path, runs


@pytest.mark.parametrize(
    "changed",
    ["requirements.txt", "pyproject.toml", "csloc_utils/a.py", "csloc_utils/new.py",
     "data/t.jsonl", "data/new/x.csv", "notebooks/01.ipynb"],
)  # fmt: skip
def test_a_chapter_runs_again_when_anything_it_depends_on_changes(project, changed):
    """jupyter-book #1633: its own cache looks at the notebook only and shows stale outputs."""
    root, runs = project
    assert not build.execute("01").reused
    assert build.execute("01").reused
    (root / changed).parent.mkdir(exist_ok=True)
    with (root / changed).open("a") as file:
        file.write("\n")
    assert not build.execute("01").reused
    assert build.execute("01").reused
    assert len(runs) == 2


def test_a_chapter_runs_again_with_other_parameters_or_on_demand(project):
    _, runs = project
    build.execute("01")
    assert not build.execute("01", {"FAST": False}).reused
    assert not build.execute("01", {"FAST": False}, reuse=False).reused
    assert len(runs) == 3


def test_a_run_that_was_cut_off_is_not_reused(project, monkeypatch):
    def cut(source, target, parameters, **_):
        target.write_text(json.dumps({}))
        raise KeyboardInterrupt

    build.execute("01")
    monkeypatch.setattr(build, "run_notebook", cut)
    with pytest.raises(KeyboardInterrupt):
        build.execute("01", reuse=False)
    with pytest.raises(KeyboardInterrupt):
        build.execute("01")


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000", 64), ("200000 100000", 2), ("50000 100000", 1)]
)
def test_threads_follow_the_quota_of_a_container(tmp_path, monkeypatch, content, cores):
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: range(64), raising=False)
    quota = tmp_path / "cpu.max"
    quota.write_text(content)
    assert build.usable_cores(quota) == min(cores, 8)
    assert build.usable_cores(tmp_path / "missing") == 8
