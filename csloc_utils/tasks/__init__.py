"""Capabilities as tasks: items in two halves that share no fact, a prefix, a scoring rule."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from csloc_utils.errors import InputError
from csloc_utils.tasks.benchmarks import BENCHMARKS, load_benchmark
from csloc_utils.tasks.builtin import BUILTIN, CONTROLS, OWN_CONTROLS
from csloc_utils.tasks.files import data_path, read_task
from csloc_utils.tasks.items import SCORINGS, SPLITS, Item, Task

__all__ = [
    "BENCHMARKS",
    "BUILTIN",
    "SCORINGS",
    "SPLITS",
    "Item",
    "Task",
    "controls_for",
    "data_path",
    "list_tasks",
    "load_benchmark",
    "load_task",
    "read_task",
]


def load_task(name_or_path: str | Path, seed: int | None = None) -> Task:
    """Load a built-in task, a benchmark, or a task of your own from a JSON Lines file.

    Parameters
    ----------
    name_or_path : str or Path
        A name in `BUILTIN` or `BENCHMARKS` (with subjects or a variant behind a colon, see
        `csloc_utils.tasks.benchmarks.load_benchmark`), or a path (see
        `csloc_utils.tasks.files.read_task` for the format).
    seed : int, optional
        Seed of the split, of the few-shot examples and of samples of items. Default: 0, or the
        seed in a file's header.

    Returns
    -------
    Task

    Raises
    ------
    InputError
        If there is no such task, or with file and line if something is wrong in the file.
    """
    if seed is not None and type(seed) is not int:
        raise InputError(f"the seed must be a whole number, not {seed!r}")
    if not isinstance(name_or_path, (str, Path)):
        raise InputError(f"a task is named by its name or its file, not by {name_or_path!r}")
    name = str(name_or_path)
    if name in BUILTIN and isinstance(name_or_path, str):
        return BUILTIN[name](0 if seed is None else seed)
    if name.partition(":")[0] in BENCHMARKS and isinstance(name_or_path, str):
        return load_benchmark(name, seed=0 if seed is None else seed)
    separators = (os.sep, os.altsep or os.sep)
    is_path = isinstance(name_or_path, Path) or any(s in name for s in separators)
    if is_path or name.endswith((".jsonl", ".json")) or (name and os.path.exists(name)):
        return read_task(name_or_path, seed)
    close = difflib.get_close_matches(name, [*BUILTIN, *BENCHMARKS], n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InputError(
        f"unknown task {name!r}: {hint}use {', '.join(BUILTIN)}, a benchmark "
        f"({', '.join(BENCHMARKS)}), or the path of a .jsonl file"
    )


def list_tasks(seed: int = 0) -> list[Task]:
    """All built-in tasks, loaded with `seed`, in the order in which they are presented."""
    return [load_task(name, seed) for name in BUILTIN]


def controls_for(task: Task) -> list[str]:
    """Names of the built-in tasks that a task's heads should leave alone.

    Plain text is always among them (unless it is the task itself): a head that every capability
    needs shows there.
    """
    known = CONTROLS if task.source == "built-in" else {}
    # A file that happens to be called "text" is no plain text, so it keeps that control.
    own = task.name if known or task.name != "text" else None
    return [name for name in known.get(task.name, OWN_CONTROLS) if name != own]
