"""Comparing searches fairly: their heads on items that none has seen, by rules fixed beforehand.

A *case* is a task, a seed and a method with a budget; its record holds the heads it named and the
damage they do to every held-out item of the task. Damage is the drop in log-probability. A method's
*share* is its damage over that of greedy search, both the mean over their seeds, clipped at 1 on
every task. A task counts only if greedy's heads do more damage than every one of the recorded
random sets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from csloc_utils.designs import as_generator
from csloc_utils.errors import InputError

N_BOOT, LEVEL = 2000, 0.90


def read_cases(path: str | Path, model: str | None = None) -> list[dict[str, Any]]:
    """Return the recorded cases of a model; a last line that was cut off is left out.

    Raises
    ------
    InputError
        If a line is no case.
    """
    file = Path(path)
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf8").split("\n")[:-1]
    try:
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if model in (None, row["model"])]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no record of cases ({error}): make it again") from error


def counted(rows: list[dict[str, Any]]) -> list[str]:
    """Names of the tasks that count: greedy's heads do more damage than every random set."""
    bands = {r["task"]: max(r["mean_drops"]) for r in rows if r["method"] == "random"}
    tasks = dict.fromkeys(r["task"] for r in rows if r["method"] == "greedy")
    return [t for t in tasks if t in bands and _drops(rows, t, "greedy").mean() > bands[t]]


def _drops(rows: list[dict[str, Any]], task: str, method: str, budget: Any = None) -> np.ndarray:
    """Return the damage to every held-out item ``(n_items,)``, the mean over seeds."""
    here = [r for r in rows if (r["task"], r["method"]) == (task, method)]
    return np.mean([r["drops"]["logprob"] for r in here if budget in (None, r["budget"])], axis=0)


def _weights(rows: list[dict[str, Any]], task: str) -> np.ndarray:
    """Resampled item weights ``(1 + N_BOOT, n_items)``; the first row is the sample itself."""
    facts = next(r["facts"] for r in rows if r["method"] == "random" and r["task"] == task)
    names, fact = np.unique(facts, return_inverse=True)
    draws = as_generator(0).multinomial(len(names), np.full(len(names), 1 / len(names)), N_BOOT)
    weights = np.vstack([np.ones((1, len(names))), draws])[:, fact]
    return weights / weights.sum(axis=1, keepdims=True)


def shares(rows: list[dict[str, Any]]) -> dict[tuple[str, int], pd.DataFrame]:
    """Share of greedy's damage by method and budget, with resamples.

    Returns
    -------
    dict of (str, int) to DataFrame
        A column a task; the first row is the share, the others are of facts drawn with replacement,
        the same ones for a method and for greedy.
    """
    result: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for task in counted(rows):
        weights = _weights(rows, task)
        here = [r for r in rows if r["task"] == task and r["method"] != "random"]
        greedy = weights @ _drops(rows, task, "greedy")
        for key in sorted({(r["method"], r["budget"]) for r in here}):
            damage = weights @ _drops(rows, task, *key)
            result.setdefault(key, {})[task] = np.minimum(damage / greedy, 1)
    return {key: pd.DataFrame(columns) for key, columns in result.items()}


def _specific(row: dict[str, Any], score: str) -> float:
    if not row["controls"]:
        return float("nan")
    controls = np.mean([c[score] for c in row["controls"].values()])
    return float(np.mean(row["drops"][score]) - controls)


def tabulate(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a row a method and budget, over the tasks that count.

    Columns: ``method``, ``budget``, ``tasks`` and ``seeds`` (how many), ``share`` with the 90 %
    interval ``low`` to ``high``, ``worst`` and ``worst task``, and means over tasks of
    ``equivalents``, ``seconds``, drop in ``probability`` and ``accuracy``, ``specific`` damage
    (log-probability; minus the mean of the control tasks), ``specific probability`` and ``recall``
    of the sweep's top heads.
    """
    tasks, table = counted(rows), []
    single = {r["task"]: set(r["heads"]) for r in rows if r["method"] == "sweep"}
    for (method, budget), share in shares(rows).items():
        here = [
            r for r in rows if (r["method"], r["budget"]) == (method, budget) and r["task"] in tasks
        ]
        means = share.mean(axis=1)
        low, high = np.quantile(means[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        by_task = pd.DataFrame(
            {
                "task": r["task"],
                "equivalents": r["equivalents"],
                "seconds": r["seconds"],
                "probability": np.mean(r["drops"]["probability"]),
                "accuracy": np.mean(r["drops"]["accuracy"]),
                "specific": _specific(r, "logprob"),
                "specific probability": _specific(r, "probability"),
                "recall": len(single[r["task"]] & set(r["heads"])) / len(r["heads"])
                if r["task"] in single
                else np.nan,
            }
            for r in here
        )
        mean = by_task.groupby("task").mean().mean()
        table.append(
            {
                "method": method,
                "budget": budget,
                "tasks": share.shape[1],
                "seeds": len({r["seed"] for r in here}),
                "share": means.iloc[0],
                "low": low,
                "high": high,
                "worst": share.iloc[0].min(),
                "worst task": share.iloc[0].idxmin(),
                **mean,
            }
        )
    return pd.DataFrame(table).sort_values(["method", "budget"], ignore_index=True)


def non_inferior(
    rows: list[dict[str, Any]],
    ours: tuple[str, int],
    other: tuple[str, int],
    margin: float = 0.05,
) -> pd.DataFrame:
    """Compare two methods task by task.

    Parameters
    ----------
    rows : list of dict
        Recorded cases.
    ours, other : (str, int)
        Method and budget.
    margin : float
        How much less share counts as no worse.

    Returns
    -------
    DataFrame
        A row a task: ``difference`` in share (paired over facts), the lower end of its one-sided
        95 % interval, and whether that lies above ``-margin``.
    """
    all_shares = shares(rows)
    difference = (all_shares[ours] - all_shares[other]).dropna(axis=1)
    low = difference[1:].quantile((1 - LEVEL) / 2)
    return pd.DataFrame(
        {"difference": difference.iloc[0], "low": low, "non-inferior": low > -margin}
    )
