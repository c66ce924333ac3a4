"""Run every chapter once and build the HTML book from what the runs produced.

Notebooks are stored without outputs. Each is executed by papermill in its fast setting into
``_build/executed``; what the book shows is staged in ``_build/src`` and built, with warnings as
errors, into ``_build/html``. A chapter whose notebook, package, data, requirements and parameters
are all unchanged is not run again. Nothing is published from a run that failed.

Usage: ``python book/build.py [--full] [--rerun]``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
import papermill
import yaml
from papermill.exceptions import PapermillExecutionError

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
FAST = {"FAST": True}
CELL_SECONDS = 900  # the longest that a cell may take in the fast setting
START_SECONDS = 180  # a kernel on a busy machine


class BookError(Exception):
    """The book cannot be built; the message says why."""


def chapters(root: Path = ROOT) -> list[str]:
    """Names of the notebooks in the order of the table of contents, such as ``01_heads``."""
    return [Path(page).stem for page in pages(root) if page.startswith("notebooks/")]


def pages(root: Path = ROOT) -> list[str]:
    """Documents of the table of contents, in order, without suffix; the first is the preface."""

    def walk(node: Mapping) -> Iterable[str]:
        for key in ("root", "file"):
            if key in node:
                yield node[key]
        for key in ("parts", "chapters", "sections"):
            for child in node.get(key, ()):
                yield from walk(child)

    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf8"))
    return [re.sub(r"\.(md|ipynb)$", "", page) for page in walk(toc)]


# Executing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """An executed chapter, cleaned for publication, and how long it took, in seconds."""

    path: Path
    seconds: float
    reused: bool = False


def execute(
    chapter: str,
    parameters: Mapping[str, object] = FAST,
    *,
    reuse: bool = True,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Run one chapter, or find its last run if nothing that matters has changed since."""
    source = ROOT / "notebooks" / f"{chapter}.ipynb"
    target = BUILD / "executed" / f"{chapter}.ipynb"
    note = target.with_suffix(".json")
    key = run_key(source, parameters)
    if reuse and target.is_file() and note.is_file():
        last = json.loads(note.read_text(encoding="utf8"))
        if last["key"] == key:
            return Run(target, last["seconds"], reused=True)
    note.unlink(missing_ok=True)
    seconds = run_notebook(source, target, parameters, cwd=source.parent, env=env)
    note.write_text(json.dumps({"key": key, "seconds": seconds}), encoding="utf8")
    return Run(target, seconds)


def run_notebook(
    source: Path,
    target: Path,
    parameters: Mapping[str, object],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
) -> float:
    """Execute `source` in `cwd`, write the cleaned result to `target`, return the seconds.

    A run that fails leaves its notebook, with the traceback, beside `target` as ``*.failed.ipynb``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    scratch = target.with_suffix(".failed.ipynb")
    quiet_kernels(BUILD / "ipython")
    before = dict(os.environ)
    os.environ.update({**kernel_environment(), **(env or {})})  # kernels inherit it
    start = time.perf_counter()
    try:
        papermill.execute_notebook(
            str(source),
            str(scratch),
            parameters=dict(parameters),
            cwd=str(cwd),
            kernel_name="python3",
            language="python",
            progress_bar=False,
            start_timeout=START_SECONDS,
            execution_timeout=CELL_SECONDS if parameters.get("FAST") else None,
        )
    except PapermillExecutionError as error:
        raise BookError(f"chapter {source.stem} failed, see {scratch}{error}") from error
    finally:
        os.environ.clear()
        os.environ.update(before)
    seconds = time.perf_counter() - start
    notebook = clean(nbformat.read(scratch, as_version=4))
    if problems := failures(notebook):
        raise BookError(f"chapter {source.stem}, see {scratch}: {'; '.join(problems)}")
    nbformat.write(notebook, target)
    scratch.unlink()
    return seconds


def run_key(source: Path, parameters: Mapping[str, object]) -> str:
    """Hash all that a chapter's outputs depend on."""
    files = [source, ROOT / "requirements.txt", ROOT / "pyproject.toml"]
    files += sorted((ROOT / "csloc_utils").rglob("*.py"))
    files += sorted(p for p in (ROOT / "data").rglob("*") if p.is_file())
    digest = hashlib.sha256(json.dumps([sys.version, dict(parameters)], sort_keys=True).encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()


def kernel_environment() -> dict[str, str]:
    """Settings of a chapter's kernel: this interpreter's, and as many threads as cores to use."""
    threads = str(usable_cores())
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        **{name: os.environ.get(name, threads) for name in names},
        "IPYTHONDIR": str(BUILD / "ipython"),  # no start-up files or history of the user
        "JUPYTER_PREFER_ENV_PATH": "1",  # nor a kernel of the user that is called python3
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures in cells, always
        "PYTHONNOUSERSITE": "1",
        # The book's claims hold in float32; bfloat16, where a processor has it, moves some of them.
        "CSLOC_DTYPE": os.environ.get("CSLOC_DTYPE", "float32"),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),  # the book needs no hub
        "TOKENIZERS_PARALLELISM": "false",
    }


def quiet_kernels(folder: Path) -> None:
    """Set up an IPython folder whose kernels do not print how they are connected and ended."""
    profile = folder / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 50\n")


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use, at most 8; a container's quota counts, not only its cores."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = cgroup.read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # not in a container of that kind
    return max(1, min(cores, 8))


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Take out what papermill added: readers see and download the chapter as it was written."""
    notebook.cells = [c for c in notebook.cells if "injected-parameters" not in tags(c)]
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
    return notebook


def failures(notebook: nbformat.NotebookNode) -> list[str]:
    """Outputs that must not be published: errors, and tracebacks printed as text."""
    found = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            text = output.get("text", "") + "".join(output.get("data", {}).get("text/plain", ""))
            if output.output_type == "error":
                found.append(f"cell {number} ended in {output.ename}: {output.evalue}")
            elif "Traceback (most recent call last)" in text:
                found.append(f"cell {number} printed a traceback")
    return found


def tags(cell: nbformat.NotebookNode) -> list[str]:
    """Tags of a notebook's cell."""
    return cell.metadata.get("tags", [])


# Staging and building -----------------------------------------------------------------------


def repository_url() -> str | None:
    """Address of the book's public repository, if it is known.

    ``BOOK_REPOSITORY_URL`` decides when it is set (empty: none); else git's remote ``origin``,
    when it is on GitHub.
    """
    if (named := os.environ.get("BOOK_REPOSITORY_URL")) is not None:
        if named and not github_url(named):
            raise BookError(f"BOOK_REPOSITORY_URL={named} is no https://github.com/OWNER/NAME")
        return github_url(named)
    git = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    try:
        remote = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return github_url(remote)


def github_url(remote: str) -> str | None:
    """Turn a git remote into ``https://github.com/OWNER/NAME``; None for any other place."""
    match = re.fullmatch(
        r"(?:https://(?:[^@/\s]+@)?github\.com/|(?:ssh://)?git@github\.com(?::22)?[:/])"
        r"([\w-][\w.-]*)/([\w.-]+?)(?:\.git)?/?",
        remote.strip(),
    )
    return f"https://github.com/{match[1]}/{match[2]}" if match else None


def book_config(repository: str | None) -> dict:
    """The book's configuration, with launch buttons only where the repository is known.

    Without an address, jupyter-book's buttons would silently lead to somebody else's repository.
    """
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf8"))
    if repository:
        config["repository"] = {"url": repository, "branch": "main", "path_to_book": ""}
        config["launch_buttons"] = {"colab_url": "https://colab.research.google.com"}
        config["html"].update(use_repository_button=True, use_issues_button=True)
    return config


def stage(executed: Mapping[str, Path], repository: str | None, target: Path) -> None:
    """Lay out in `target` exactly what the book is built from."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "notebooks").mkdir(parents=True)
    config = yaml.safe_dump(book_config(repository), sort_keys=False, allow_unicode=True)
    (target / "_config.yml").write_text(config, encoding="utf8")
    shutil.copy(ROOT / "_toc.yml", target)
    hidden = shutil.ignore_patterns("__pycache__", Path(__file__).name)
    shutil.copytree(ROOT / "book", target / "book", ignore=hidden)
    for chapter, path in executed.items():
        shutil.copy(path, target / "notebooks" / f"{chapter}.ipynb")


def build_html(source: Path, output: Path) -> Path:
    """Build the staged book with warnings as errors; return the folder of its pages."""
    html = output / "_build" / "html"
    for stale in (html, html.parent / ".doctrees", html.parent / ".jupyter_cache"):
        shutil.rmtree(stale, ignore_errors=True)
    program = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]
    options = ["--path-output", str(output), "-q", "-W", "-n", "--keep-going", "--all"]
    command([*program, "build", str(source), *options])
    missing = [p for p in pages() if not (html / f"{p}.html").is_file()]
    if missing:
        raise BookError(f"the build made no page for {', '.join(missing)}")
    return html


def command(line: list[str]) -> None:
    """Run a program quietly; if it fails, all that it said is the error."""
    run = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        said = re.sub(r"\x1b\[[\d;]*m", "", run.stdout)  # without its colours
        raise BookError(f"this failed: {' '.join(line)}\n{said.strip()}")


def main(arguments: list[str] | None = None) -> int:
    """Build the book; the exit status."""
    parser = argparse.ArgumentParser(description="run every chapter and build the book")
    parser.add_argument("--full", action="store_true", help="the full setting, not the fast one")
    parser.add_argument("--rerun", action="store_true", help="run chapters even if unchanged")
    options = parser.parse_args(arguments)
    try:
        repository, executed = repository_url(), {}
        for chapter in chapters():
            print(f"{chapter} ...", end=" ", flush=True)
            run = execute(chapter, {"FAST": not options.full}, reuse=not options.rerun)
            executed[chapter] = run.path
            print("unchanged" if run.reused else f"{run.seconds:.0f} s", flush=True)
        print("building the pages ...", flush=True)
        stage(executed, repository, BUILD / "src")
        html = build_html(BUILD / "src", ROOT)
    except BookError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    print(f"The book is ready: open {html.relative_to(ROOT)}/index.html in a browser.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
