"""What the command line writes to a file: results with everything needed to make them again."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from argparse import Namespace
from collections.abc import Sequence
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
    """Raise `InputError` unless a file can be written at `path`."""
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; give a file name in it")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: no permission; choose another place")


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report; a reader sees the old file or the whole new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(
            json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8"
        )
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}; choose another place") from error


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
        "method": args.method,
        "k": args.k,
        "score": args.score,
        "gate": gate.to_dict(),
        "baseline": {name: float(np.mean(v)) for name, v in evaluator.baseline.items()},
        "heads": result.table if result else [],
        "chunk": evaluator.chunk,
        "evaluations": result.evaluations if result else evaluator.evaluations,
    }
    if result and result.method == "paper":
        report |= {"design": result.extra["design"], "mask_size": result.extra["size"]}
        report["never_ablated"] = [str(head) for head in result.extra["never_ablated"]]
    if verification:
        report["verify"] = verification.to_dict()
    return report


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
        "seed": 0 if args.seed is None else args.seed,
        "ablation": args.ablation,
        "versions": {
            "csloc": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }
