"""A run as one page: ``csloc report`` turns what ``csloc locate --json`` wrote into HTML.

The page is a notebook of the package (``report.ipynb``), executed by papermill and exported by
nbconvert without its code. It holds its figures and its style, and loads nothing from anywhere.
What it says stands in :mod:`csloc_utils.report_sections`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from csloc_utils.errors import InputError

_HERE = Path(__file__).parent
_NEEDED = ("papermill", "nbconvert", "ipykernel")
_KERNEL = "csloc-report"
_CELL_SECONDS = 300


def report(args: argparse.Namespace) -> None:
    """Write the page of a run."""
    out = args.out or args.run_json.with_suffix(".html")
    make_report(args.run_json, out, force=args.force)
    print(f"written to {out}")


def read_run(path: Path) -> dict[str, Any]:
    """Read what ``csloc locate --json`` wrote.

    Parameters
    ----------
    path : Path

    Returns
    -------
    dict

    Raises
    ------
    InputError
        If the file cannot be read, or is no result of `locate` of this version's form.
    """
    try:
        run = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON"
        raise InputError(f"cannot read {path}: {reason}; give a file of `locate --json`") from error
    if isinstance(run, dict) and "results" in run and "gate" not in run:
        raise InputError(f"{path} is from `csloc ablate`: give a file of `locate --json`")
    from csloc_utils import report_sections as sections

    try:
        for section in sections.SECTIONS:
            section(run)
        sections.again(run, "")
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, StopIteration) as error:
        raise InputError(
            f"{path} is no complete result of `csloc locate`, or of an older version of it: run "
            "the command again with --json"
        ) from error
    return run


def make_report(path: Path, out: Path, *, force: bool = False) -> None:
    """Write the page of a run, whole or not at all.

    Parameters
    ----------
    path : Path
        What ``csloc locate --json`` wrote.
    out : Path
        The HTML file.
    force : bool
        Whether a file that is there already is replaced.

    Raises
    ------
    InputError
        If the run cannot be read, the page not be written, or the tools are not installed; before
        the notebook runs.
    """
    path, out = Path(path), Path(out)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f'a report needs {" and ".join(missing)}: install them with pip install "csloc[report]"'
        )
    if out.exists() and not force:
        raise InputError(f"{out} is there already: name another --out, or replace it with --force")
    run = read_run(path)
    from csloc_utils.results import check_writable, write_text

    check_writable(out)
    body = _execute(path)
    page = Template((_HERE / "report_page.html").read_text("utf-8"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    title = f"Heads of {run['task']['name']} in {run['model']['name']}"
    write_text(out, page.substitute(title=escape(title), body=body, source=digest))


def _execute(path: Path) -> str:
    """Run the notebook on a result and return its outputs and texts as HTML."""
    import nbformat
    import papermill
    from nbconvert import HTMLExporter

    with tempfile.TemporaryDirectory() as folder, _own_kernel(Path(folder)):
        done = Path(folder) / "report.ipynb"
        papermill.execute_notebook(
            str(_HERE / "report.ipynb"),
            str(done),
            parameters={"RUN": str(path.resolve()), "NAME": path.name},
            cwd=folder,
            kernel_name=_KERNEL,
            language="python",
            progress_bar=False,
            log_output=False,
            execution_timeout=_CELL_SECONDS,
        )
        notebook = nbformat.read(done, as_version=4)
    for cell in notebook.cells:  # a library's warnings are no part of the page
        if "outputs" in cell:
            cell.outputs = [o for o in cell.outputs if o.output_type != "stream"]
    exporter = HTMLExporter(
        template_name="basic",  # no page of its own, hence no scripts from elsewhere
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    return exporter.from_notebook_node(notebook)[0]


@contextmanager
def _own_kernel(folder: Path) -> Iterator[None]:
    """Let kernels be this very interpreter, whatever else is called python3, without user files."""
    kernel = folder / "jupyter" / "kernels" / _KERNEL
    kernel.mkdir(parents=True)
    start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": start, "display_name": _KERNEL, "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec), "utf-8")
    profile = folder / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 50\n", "utf-8")
    before = dict(os.environ)
    paths = [str(folder / "jupyter"), before.get("JUPYTER_PATH", "")]
    os.environ.update(
        JUPYTER_PATH=os.pathsep.join(filter(None, paths)),
        IPYTHONDIR=str(folder / "ipython"),
        MPLBACKEND="agg",
        PYDEVD_DISABLE_FILE_VALIDATION="1",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
