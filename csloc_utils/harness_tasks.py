"""Finding a task of lm-evaluation-harness, and refusing what must not run.

Nothing is read that would execute a model's text, and every error of the harness becomes one line.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from csloc_utils.errors import InputError
from csloc_utils.harness_lm import apart

INSTALL = 'pip install "csloc[harness]"'
PREFIX = "lm-eval:"
# Where the data lies and how it is called plays no part in what is computed from it.
_PASSING = ("task", "task_alias", "tag", "metadata", "dataset_path", "dataset_name")
_PASSING += ("dataset_kwargs",)


def version() -> str:
    """Return the harness's version, or say how to install it."""
    try:
        import lm_eval
    except ImportError:
        raise InputError(
            f"tasks of lm-evaluation-harness need the package lm_eval: {INSTALL}"
        ) from None
    return lm_eval.__version__


def load_harness_task(name: str, include_path: str | Path | None) -> Any:
    """Find a task by name and load it with its data; refuse one that runs foreign code."""
    version()
    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(f"{str(include_path)!r} is no folder of YAML tasks: correct include_path")
    manager = _manager(include_path and str(Path(include_path).resolve()), name)
    entry = manager.task_index.get(name)
    if entry is None:
        close = difflib.get_close_matches(name, manager.all_subtasks, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "see lm-eval ls tasks"
        raise InputError(f"the harness has no task {name!r}: {hint}")
    if name not in manager.all_subtasks:
        members = (entry.cfg or {}).get("task") or sorted(entry.tags)
        members = [member for member in members if isinstance(member, str)][:3]
        hint = ", such as " + ", ".join(members) if members else ""
        raise InputError(f"{name!r} is a group of tasks of the harness: name one of them{hint}")
    settings = entry.cfg or {}
    metrics = settings.get("metric_list") or []
    _refuse(name, settings.get("unsafe_code"), "runs programs that the model writes")
    _refuse(name, any(m.get("hf_evaluate") for m in metrics), "scores with code from the hub")
    where = settings.get("dataset_path") or "its source"
    remedy = "check the network, or load it once while there is one"
    with explained(f"the data of {name!r} cannot be loaded from {where}", remedy), apart():
        task = manager.load([name])["tasks"][name]
    _refuse(name, getattr(task, "UNSAFE_CODE", False), "runs programs that the model writes")
    return task


def _refuse(name: str, unsafe: Any, what: str) -> None:
    if unsafe:
        raise InputError(f"task {name!r} {what}, which is never allowed here: choose another task")


def _manager(include_path: str | None, name: str) -> Any:
    """Return an index that knows the task; the harness's own takes many seconds to read."""
    from lm_eval.tasks import TaskManager

    if include_path:
        with apart():
            own = TaskManager(include_path=include_path, include_defaults=False)
            # A file may build on one of the harness's own by name only if these are there too.
            return own if name in own.task_index else TaskManager(include_path=include_path)
    return _own_manager()


@cache
def _own_manager() -> Any:
    from lm_eval.tasks import TaskManager

    with apart():
        return TaskManager()


def set_shots(harness: Any, name: str, num_fewshot: int | None) -> None:
    """Set the number of few-shot examples, if one is given."""
    configured = harness.get_config("num_fewshot")
    if num_fewshot is not None and (type(num_fewshot) is not int or num_fewshot < 0):
        raise InputError(f"num_fewshot is {num_fewshot!r}: give a whole number from 0 on")
    if configured == 0 and num_fewshot:
        raise InputError(f"task {name!r} has no few-shot examples by design: leave out num_fewshot")
    harness.set_config("num_fewshot", (configured or 0) if num_fewshot is None else num_fewshot)


def chance(harness: Any, docs: Sequence[dict]) -> float | None:
    """Accuracy of blind guessing among the choices, where there are choices."""
    if harness.OUTPUT_TYPE != "multiple_choice":
        return None
    return float(np.mean([1 / len(harness.doc_to_choice(doc)) for doc in docs]))


def settings(harness: Any) -> str:
    """Identity of what a task computes: its configuration with the source of its functions."""
    kept = {k: v for k, v in harness.dump_config().items() if k not in _PASSING}
    text = json.dumps(kept, sort_keys=True, default=str)
    # A function that cannot be printed shows its place in memory, which every process changes.
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever the harness and its data loaders raise into one `InputError`."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"{what} without another package ({error}): install it") from error
    except Exception as error:
        raise InputError(f"{what} ({reason(error)}): {remedy}") from error


def reason(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
