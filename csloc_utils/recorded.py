"""Measurements that were made once, at length, and are looked up again.

What takes hours (a greedy search over every head, hundreds of random masks) is recorded with its
provenance. A `RecordedEvaluator` answers from such a file what an `Evaluator` answers from a model,
so searches and figures run on it unchanged; asked for what was not recorded, it says so. A record
is trusted only as far as `spot_check` goes: it measures a random part of it again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from csloc_utils.designs import as_generator, check_count
from csloc_utils.errors import InputError
from csloc_utils.gradients import Slopes, slope_point
from csloc_utils.heads import HeadGrid
from csloc_utils.measure import Evaluator
from csloc_utils.measurements import Measurements, Scorer
from csloc_utils.tasks import data_path

# What two runs of the same float32 arithmetic in other shapes or on other machines may differ by,
# in nats; short floats round every product.
_TOLERANCE = {"float32": 0.02, "bfloat16": 0.75, "float16": 0.3}


class RecordedEvaluator(Scorer):
    """Answers from a file what `csloc_utils.measure.Evaluator` measures.

    Parameters
    ----------
    path : str or Path
        What `record` wrote; or ``model/task``, a record that comes with the package, such as
        ``smollm2-135m-q4/multiplication``.

    Attributes
    ----------
    grid, scores, items, facts, task, split, baseline, evaluations
        As of an `Evaluator`; `items` are the prompts.
    masks : bool array (n_recorded, n_heads)
        Everything that is on record.
    provenance : dict
        Model, items, versions and date of the measurements.

    Raises
    ------
    InputError
        If there is no such record.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        if not file.suffix:
            file = data_path("recorded", f"{path}.npz")
        try:
            with np.load(file, allow_pickle=False) as data:
                self.provenance: dict[str, Any] = json.loads(str(data["about"]))
                self._scores = {n: data[n].astype(float) for n in self.provenance["scores"]}
                packed, self._slopes = data["masks"], data["slopes"].astype(float)
        except (OSError, KeyError, ValueError) as error:
            raise InputError(
                f"{file} is no record of measurements ({error}): make one with "
                "csloc_utils.recorded.record, or name one that exists"
            ) from error
        about = self.provenance
        self.grid = HeadGrid(**about["grid"])
        self.scores = tuple(about["scores"])
        self.items, self.facts = tuple(about["items"]), np.array(about["facts"])
        self.task = SimpleNamespace(name=about["task"], scoring=about["scoring"])
        self.split = about["split"]
        self.masks = np.unpackbits(packed, axis=1, count=self.grid.size).astype(bool)
        self._row = {mask.tobytes(): i for i, mask in enumerate(self.masks)}
        self._point = {point: i for i, point in enumerate(about["points"])}
        super().__init__()

    def measure(self, masks: np.ndarray, count: bool = True) -> Measurements:
        """Look masks up; see `Evaluator.measure`."""
        masks = self.grid.check_masks(masks)
        rows = [self._row.get(mask.tobytes()) for mask in masks]
        if None in rows:
            raise InputError(
                f"{rows.count(None)} of {len(rows)} masks of {self.task.name} are not on record: "
                "measure them with an Evaluator"
            )
        if count:
            self._count(len(masks))
        intact = self._row[bytes(self.grid.size)]
        scores = {name: values[rows] for name, values in self._scores.items()}
        unchanged = {n: np.repeat(v[[intact]], len(rows), 0) for n, v in self._scores.items()}
        return Measurements(self.grid, masks, scores, unchanged, self.facts, self.provenance)

    def holds(self, masks: np.ndarray) -> bool:
        """Whether all these masks are on record; some tasks have a sweep and nothing more."""
        return all(mask.tobytes() in self._row for mask in self.grid.check_masks(masks))

    def slopes(
        self, masks: np.ndarray, strength: float = 1.0, score: str = "logprob", count: bool = True
    ) -> Slopes:
        """Look slopes up; see `Evaluator.slopes`."""
        masks = self.grid.check_masks(masks)
        rows = [self._point.get(slope_point(mask, strength, score)) for mask in masks]
        if None in rows:
            raise InputError(
                f"slopes of {self.task.name} at {rows.count(None)} of {len(rows)} points are not "
                "on record: measure them with an Evaluator"
            )
        if count:
            self._count(len(masks), backward=True)
        return Slopes(masks, float(strength), -self._slopes[rows], score)


def recorded_tasks(model: str) -> list[str]:
    """Names of the tasks of which a record of this model comes with the package."""
    try:
        return sorted(path.stem for path in data_path("recorded", model).glob("*.npz"))
    except InputError:
        return []


def recorded_json(model: str, name: str) -> dict[str, Any] | None:
    """Return a record that is no table of masks, such as ``atlas``; None if there is none.

    Parameters
    ----------
    model, name : str
        The file ``data/recorded/<model>/<name>.json``, which comes with the package.
    """
    try:
        file = data_path("recorded", model, f"{name}.json")
    except InputError:
        return None
    return json.loads(file.read_text("utf8"))


def record(evaluator: Evaluator, path: str | Path, command: str = "") -> int:
    """Write everything that an evaluator's store holds for it; return how many masks that is.

    Scores are kept as 32-bit numbers, one file an evaluator.

    Parameters
    ----------
    evaluator : Evaluator
    path : str or Path
        A ``.npz`` file.
    command : str
        What made the measurements, for the provenance.
    """
    masks, scores, slopes = evaluator.everything()
    about = evaluator.provenance | {
        "command": command,
        "grid": {
            name: getattr(evaluator.grid, name)
            for name in ("n_layers", "n_heads", "n_kv_heads", "head_width")
        },
        "scoring": evaluator.task.scoring,
        "scores": list(evaluator.scores),
        "items": [item.prompt for item in evaluator.items],
        "fingerprint": evaluator.provenance["items"],
        "facts": evaluator.facts.tolist(),
        "points": list(slopes),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        about=json.dumps(about, sort_keys=True),
        masks=np.packbits(masks, axis=1),
        slopes=np.array(list(slopes.values()), np.float32).reshape(-1, evaluator.grid.size),
        **{name: scores[:, i].astype(np.float32) for i, name in enumerate(evaluator.scores)},
    )
    return len(masks)


@dataclass(frozen=True)
class SpotCheck:
    """Recorded effects beside the same ones measured again.

    Attributes
    ----------
    masks : bool array (n_masks, n_heads)
    recorded, measured : float arrays (n_masks,)
        Mean effects in log-probability.
    tolerance : float
        Largest difference that rounding explains, in nats.
    """

    masks: np.ndarray
    recorded: np.ndarray
    measured: np.ndarray
    tolerance: float

    @property
    def largest(self) -> float:
        """Largest difference, in nats."""
        return float(np.abs(self.recorded - self.measured).max())

    @property
    def passed(self) -> bool:
        """Whether all differences are within the tolerance."""
        return self.largest <= self.tolerance

    def require(self) -> SpotCheck:
        """Return the check, or raise `InputError` if record and model disagree."""
        if self.passed:
            return self
        raise InputError(
            f"recorded effects differ by up to {self.largest:.3f} nats from the same ones measured "
            f"now (allowed: {self.tolerance}): the record is of another model, task or version; "
            "record it again"
        )


def spot_check(
    recorded: RecordedEvaluator, evaluator: Evaluator, n_masks: int = 4, seed: int = 0
) -> SpotCheck:
    """Measure a random sample of the recorded masks again.

    Parameters
    ----------
    recorded : RecordedEvaluator
    evaluator : Evaluator
        The same model and items; nothing may be in its store, or nothing is measured.
    n_masks, seed : int
        Size and seed of the sample.

    Raises
    ------
    InputError
        If the evaluator has other items or heads than the record.
    """
    if evaluator.grid != recorded.grid or [i.prompt for i in evaluator.items] != list(
        recorded.items
    ):
        raise InputError("the evaluator has other heads or items than the record: use the same")
    check_count("n_masks", n_masks, high=len(recorded.masks))
    rows = as_generator(seed).choice(len(recorded.masks), n_masks, replace=False)
    masks = recorded.masks[rows]
    dtype = str(evaluator.model.dtype).removeprefix("torch.")
    return SpotCheck(
        masks,
        recorded.measure(masks, count=False).effects(),
        evaluator.measure(masks, count=False).effects(),
        _TOLERANCE[dtype],
    )
