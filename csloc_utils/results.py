"""What the command line writes to a file: results with everything needed to make them again."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import stat
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from csloc_utils import __version__
from csloc_utils.errors import InputError
from csloc_utils.gate import Gate
from csloc_utils.heads import Head
from csloc_utils.measure import Evaluator
from csloc_utils.models import HeadModel
from csloc_utils.search import SearchResult
from csloc_utils.verify import Verification

_PACKAGES = ("torch", "transformers", "nnsight", "scikit-learn", "numpy", "scipy")


def check_writable(path: Path) -> None:
    """Raise `InputError` unless `write_json` will be able to write at `path`."""
    with _explained(path):
        target = Path(os.path.realpath(path))
        try:
            mode = os.stat(target).st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG
        if stat.S_ISDIR(mode):
            raise InputError(f"cannot write {path}: it is a folder; give a file name in it")
        if not target.parent.is_dir():
            raise InputError(
                f"cannot write {path}: there is no folder {path.parent}; make it first"
            )
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
        if stat.S_ISREG(mode):
            scratch = _beside(target)
            scratch.touch()
            scratch.unlink()


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report; a reader sees the old file or the whole new one.

    A link is followed; what is no ordinary file (a pipe, ``/dev/stdout``) is written to directly.
    """
    write_text(path, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text as `write_json` does a report."""
    with _explained(path):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            target.write_text(text, "utf-8")
            return
        scratch = _beside(target)
        try:
            scratch.write_text(text, "utf-8", errors="surrogateescape")
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    return target.with_name(f".csloc-{os.getpid()}.json")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot write {str(path)[:80]!r}: {reason}; choose another place"
        ) from error


def locate_report(
    args: Namespace,
    evaluator: Evaluator,
    gate: Gate,
    result: SearchResult | None = None,
    verification: Verification | None = None,
) -> dict[str, Any]:
    """Return what ``csloc locate`` found; no heads if the gate stopped it."""
    task = evaluator.task
    report = _header(args, evaluator.model) | {
        "task": {
            "name": task.name,
            "capability": task.capability,
            "scoring": task.scoring,
            "source": task.source,
            "seed": task.seed,
            "items": len(evaluator.items),
            "fingerprint": task.fingerprint(evaluator.items),
        },
        "seed": task.seed,
        "method": args.method,
        "k": args.k,
        "score": args.score,
        "gate": gate.to_dict(),
        "baseline": {name: float(np.mean(v)) for name, v in evaluator.baseline.items()},
        "heads": result.table if result else [],
        "chunk": evaluator.chunk,
        "evaluations": result.evaluations if result else evaluator.evaluations,
    }
    if result and result.method == "screened":
        report["contrast"] = args.contrast
    if result and result.method == "race":
        report["settled"] = result.extra["race"].settled
    if result and result.method == "paper":
        report |= {"design": result.extra["design"], "mask_size": result.extra["size"]}
        report["never_ablated"] = [str(head) for head in result.extra["never_ablated"]]
    if result:
        report |= _search_details(result)
    if verification:
        report["verify"] = verification.to_dict()
    return report


def _search_details(result: SearchResult) -> dict[str, Any]:
    """One number for every head of the model, and what a regression's masks support."""
    extra, details = result.extra, {}
    if result.method == "greedy":
        details["all_heads"] = ("single effect", extra["rounds"][0].effects(extra["score"]))
    elif result.method == "screened":
        details["all_heads"] = ("guess from the slope", extra["rounds"][0]["slopes"])
    elif result.method == "paper":
        ablated = extra["measurements"].masks.any(axis=0)  # nothing is known of the others
        coefficients = np.where(ablated, extra["estimator"].coef_, np.nan)
        details["all_heads"] = ("coefficient", coefficients)
        if "diagnosis" not in extra:  # takes seconds, and a result is written twice
            extra["diagnosis"] = _diagnosis(extra["measurements"].masks, extra["effects"])
        details["diagnosis"] = extra["diagnosis"]
    if "all_heads" in details:
        what, values = details["all_heads"]
        numbers = [float(v) if np.isfinite(v) else None for v in values]
        details["all_heads"] = {"what": what, "values": numbers}
    return details


def _diagnosis(masks: np.ndarray, effects: np.ndarray) -> dict[str, Any] | None:
    """`csloc_utils.assumptions.diagnose` for JSON; None where there are too few masks for it."""
    from csloc_utils.assumptions import diagnose  # scikit-learn takes a while to load

    try:
        made = vars(diagnose(masks, effects))
    except InputError:
        return None
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in made.items()
    }


def ablate_report(
    args: Namespace, model: HeadModel, heads: Sequence[Head], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what ``csloc ablate`` measured."""
    return _header(args, model) | {
        "split": args.split,
        "heads": [str(head) for head in heads],
        "results": results,
    }


def _header(args: Namespace, model: HeadModel) -> dict[str, Any]:
    return {
        "command": args.command_line,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {
            "name": model.name,
            "layers": model.grid.n_layers,
            "heads": model.grid.n_heads,
            "fingerprint": model.fingerprint,
        },
        "ablation": args.ablation,
        "versions": {
            "csloc": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }
