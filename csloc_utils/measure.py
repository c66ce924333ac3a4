"""Measuring masks: each one scored on the same items, in the same batches, beside the intact model.

An `Evaluator` holds one model and one set of items. For every mask it runs the shared few-shot
prefix once, hands its key/value cache to all items, and scores them in one forward. Several masks
travel together in a *chunk*. A chunk's shape is fixed and recorded, because even in float32 a
product's last digits depend on its shape; the intact baseline is measured in the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from tqdm.auto import tqdm

from csloc_utils.ablation import KINDS, Ablation, forward
from csloc_utils.designs import check_count
from csloc_utils.devices import out_of_memory
from csloc_utils.errors import InputError
from csloc_utils.gradients import Slopes, score_slopes, slope_point
from csloc_utils.measurements import Measurements, Scorer
from csloc_utils.models import HeadModel
from csloc_utils.references import donor_values, token_means
from csloc_utils.reuse import WORTH_SKIPPING, BaseRun
from csloc_utils.scoring import SCORES, combine, encode, probe_logits
from csloc_utils.store import Store
from csloc_utils.tasks import Item, Task

# A forward on this many tokens keeps the arithmetic units busy; more only costs memory.
_BUSY_TOKENS = {"cpu": 512, "cuda": 65536}
_MEMORY_SHARE = 0.4
# Masks with heads in common before the state of those heads is worth a run of its own.
_WORTH_A_BASE = 6


class Evaluator(Scorer):
    """Scores masks of one model on one set of items, and counts what is asked of it.

    Parameters
    ----------
    model : HeadModel
    task : Task
    split : {"locate", "verify", "all"}
        Which of the task's items.
    n_items : int, optional
        A seeded random sample of that many; all by default.
    ablation : {"zero", "mean", "resample"}
        What replaces a masked head: zero; its mean over the tokens of the task's *locate* items;
        or its value in another item at the same distance from the answer.
    store : Store or path, optional
        Where measurements are kept; the user's cache by default, ``:memory:`` for nowhere.
    chunk : int, optional
        Masks per forward; from free memory by default, or as recorded in the store.
    progress : bool, optional
        Show a progress bar; by default only on a terminal.
    items : sequence of Item, optional
        Score these items instead of the task's own.

    Attributes
    ----------
    grid : HeadGrid
    items : tuple of Item
    facts : str array (n_items,)
    evaluations : dict
        ``forward``, ``backward`` and ``equivalents`` (a backward counts two) asked for so far.
    """

    def __init__(
        self,
        model: HeadModel,
        task: Task,
        split: str = "locate",
        n_items: int | None = None,
        *,
        ablation: str = "zero",
        store: Store | str | Path | None = None,
        chunk: int | None = None,
        progress: bool | None = None,
        items: tuple[Item, ...] | None = None,
    ) -> None:
        if not isinstance(model, HeadModel):
            raise InputError(f"{model!r} is no HeadModel: use what load_model returns")
        if not isinstance(task, Task):
            raise InputError(f"{task!r} is no Task: use what load_task returns")
        if ablation not in KINDS:
            raise InputError(f"unknown ablation {ablation!r}: choose from {', '.join(KINDS)}")
        if chunk is not None:
            check_count("chunk", chunk)
        self.model, self.task, self.split, self.ablation = model, task, split, ablation
        self.items = task.items(split, n_items) if items is None else tuple(items)
        if not self.items:
            raise InputError("there are no items to score: give at least one")
        if ablation == "resample" and len(self.items) < 2:
            raise InputError("resample ablation takes values from another item: give two or more")
        self.facts = np.array([item.fact or item.prompt for item in self.items])
        self.grid, self.progress = model.grid, progress
        self.scores = SCORES[task.scoring]
        super().__init__()
        self._encoded = encode(task, self.items, model.tokenizer, model.max_length)
        self.store = store if isinstance(store, Store) else Store(store)
        self._context = self.store.context(self._key(), self.scores)
        self.chunk = chunk or self.store.chunk(self._context) or self._fitting_chunk()
        self._intact: dict[int, np.ndarray] = {}
        self._base_runs: dict[bytes, BaseRun] = {}

    def fits(self, item: Item) -> bool:
        """Whether an item can be scored: it fits the model's context, its answer has tokens."""
        try:
            encode(self.task, [item], self.model.tokenizer, self.model.max_length)
        except InputError:
            return False
        return True

    def measure(self, masks: np.ndarray, count: bool = True) -> Measurements:
        """Score masks; what the store already holds is not run again.

        Parameters
        ----------
        masks : bool array (n_masks, n_heads)
            True = ablated.
        count : bool
            Whether the masks count as evaluations (verification does not).

        Returns
        -------
        Measurements
        """
        masks = self.grid.check_masks(masks)
        if count:
            self._count(len(masks))
        # The intact model first, then each mask once. Masks that leave their base in the same
        # layers share a chunk, which then starts there. Base and order depend on the masks alone:
        # a resumed run rebuilds the chunks of the first one.
        base = masks.all(axis=0) if len(masks) >= _WORTH_A_BASE else np.zeros(self.grid.size, bool)
        intact = np.zeros(self.grid.size, bool)
        if self._known(intact) is None:
            self._run([intact], intact)
        wanted = {m.tobytes(): m for m in [intact, *masks]}
        known = {key: self._known(mask) for key, mask in wanted.items()}
        missing = {key: mask for key, mask in wanted.items() if known[key] is None}
        self._run(sorted(missing.values(), key=lambda m: self._depth(m, base)), base)
        known |= {key: self._known(mask) for key, mask in missing.items()}
        return self._collect(masks, [known[mask.tobytes()] for mask in masks])

    def part(self, rows: np.ndarray) -> Evaluator:
        """Return an evaluator of these of the items only, which counts by itself."""
        return Evaluator(
            self.model,
            self.task,
            self.split,
            ablation=self.ablation,
            store=self.store,
            progress=self.progress,
            items=tuple(self.items[row] for row in rows),
        )

    def slopes(
        self, masks: np.ndarray, strength: float = 1.0, score: str = "logprob", count: bool = True
    ) -> Slopes:
        """Differentiate the mean score along every head's keep-strength, one pass a mask.

        Parameters
        ----------
        masks : bool array (n_masks, n_heads)
            True = off at this point.
        strength : float
            Keep-strength of all other heads, from 0 (as if ablated) to 1 (intact).
        score : {"logprob", "margin"}
        count : bool
            Whether the passes count: each is one forward, and a backward that costs two more.

        Returns
        -------
        Slopes
        """
        masks = self.grid.check_masks(masks)
        if not 0 <= strength <= 1:
            raise InputError(f"strength is {strength!r}: give a keep-strength from 0 to 1")
        if count:
            self._count(len(masks), backward=True)
        effects = np.zeros(masks.shape)
        for row, mask in enumerate(masks):
            point = slope_point(mask, strength, score)
            slopes = self.store.get_slopes(self._context, point)
            if slopes is None:
                slopes = score_slopes(
                    self.model, self._encoded, mask, strength, self._ablations, score
                )
                self.store.put_slopes(self._context, point, slopes)
            effects[row] = -slopes
        return Slopes(masks, float(strength), effects, score)

    def everything(self) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Return what the store holds for this evaluator.

        Returns
        -------
        masks : bool array (n_masks, n_heads)
        scores : float array (n_masks, n_scores, n_items)
            In the order of `scores`; one chunk shape, that of most measurements.
        slopes : dict of str to float array (n_heads,)
            By `slope_point`.
        """
        packed, scores = self.store.all(self._context, self.chunk)
        masks = np.unpackbits(packed, axis=1, count=self.grid.size).astype(bool)
        scores = scores.reshape(len(masks), len(self.scores), -1)
        return masks, scores, self.store.all_slopes(self._context)

    def _run(self, missing: list[np.ndarray], base: np.ndarray) -> None:
        """Measure and keep masks chunk by chunk; halve the chunk when memory runs out."""
        bar = tqdm(
            total=len(missing),
            unit="mask",
            desc=f"{self.task.name} ({self.split})",
            disable=None if self.progress is None else not self.progress or not missing,
        )
        with bar:
            done = 0
            while done < len(missing):
                part = missing[done : done + self.chunk]
                try:
                    scores = self._score(np.array(part), base)
                except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                    if not out_of_memory(error):
                        raise
                    if self.chunk == 1:
                        raise InputError(
                            "a single mask does not fit into memory: use fewer items"
                        ) from error
                    error.__traceback__ = None  # it holds the tensors that did not fit
                    self.chunk //= 2
                    if torch.cuda.is_available():
                        torch.cuda.empty_cache()
                    continue
                self.store.put(self._context, self.chunk, np.array(part), scores)
                done += len(part)
                bar.update(len(part))

    def _score(self, masks: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Run one chunk of masks that hold the base's heads: ``(n_masks, n_scores, n_items)``."""
        filled = np.zeros((self.chunk, self.grid.size), bool)  # same shape for every chunk
        filled[: len(masks)] = masks
        encoded, model = self._encoded, self.model
        n_rows, chunk = len(encoded.rows), self.chunk
        for_prefix, for_items = self._ablations
        first = self._first_layer(masks, base)
        begun = self._base_run(base) if first else None
        cache = None
        if encoded.prefix:
            ids = torch.tensor(encoded.rows[0][: encoded.prefix]).repeat(chunk, 1)
            last = torch.full((chunk, 1), encoded.prefix - 1)
            start = begun.in_prefix(first, chunk) if begun else None
            cache = forward(
                model,
                ids,
                torch.ones_like(ids),
                filled,
                for_prefix,
                last,
                keep_cache=True,
                start=start,
            ).cache
            if begun:
                begun.complete(cache, first, chunk)
            cache.batch_repeat_interleave(n_rows)
        start = begun.in_items(first, chunk) if begun else None
        ids, attention = (part.repeat(chunk, 1) for part in self._suffixes)
        places = torch.from_numpy(encoded.positions - encoded.prefix).repeat(chunk, 1)
        rows = filled.repeat(n_rows, axis=0)
        logits = forward(
            model, ids, attention, rows, for_items, places, cache=cache, start=start
        ).logits
        scores = combine(encoded, *probe_logits(encoded, logits))
        return np.stack([scores[name] for name in self.scores], axis=1)[: len(masks)]

    def _first_layer(self, masks: np.ndarray, base: np.ndarray) -> int:
        """Return the first layer that differs from the base, if it pays to begin there."""
        if not self.model.can_start_late:
            return 0
        first = min(self._depth(mask, base) for mask in masks)
        return first if WORTH_SKIPPING <= first < self.grid.n_layers else 0

    def _depth(self, mask: np.ndarray, base: np.ndarray) -> int:
        """Return the first layer in which a mask differs from its base; past the last for none."""
        other = np.flatnonzero(mask != base)
        return int(other[0]) // self.grid.n_heads if len(other) else self.grid.n_layers

    def _base_run(self, base: np.ndarray) -> BaseRun:
        """Return the states under a base; only the intact model's and the last one are kept."""
        key = base.tobytes()
        if key not in self._base_runs:
            intact = bytes(len(key))
            self._base_runs = {k: v for k, v in self._base_runs.items() if k == intact}
            self._base_runs[key] = BaseRun(self.model, self._encoded, base, *self._ablations)
        return self._base_runs[key]

    @cached_property
    def _suffixes(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._encoded.suffixes()

    @cached_property
    def _ablations(self) -> tuple[Ablation, Ablation]:
        """What masked heads become, in the prefix and in the items."""
        if self.ablation == "zero":
            return Ablation(), Ablation()
        if self.ablation == "mean":
            means = token_means(self.model, self.task)
            return Ablation(means), Ablation(means)
        return donor_values(self.model, self._encoded)

    def _known(self, mask: np.ndarray) -> tuple[int, np.ndarray] | None:
        """Return a stored measurement with its chunk shape, the current shape if possible."""
        found = self.store.get(self._context, mask, len(self.scores))
        if not found:
            return None
        chunk = self.chunk if self.chunk in found else max(found)
        return chunk, found[chunk]

    def _collect(self, masks: np.ndarray, pairs: list[tuple[int, np.ndarray]]) -> Measurements:
        """Put stored scores beside the intact ones of the same chunk shape."""
        for chunk in {chunk for chunk, _ in pairs} - set(self._intact):
            none = np.zeros((1, self.grid.size), bool)
            stored = self.store.get(self._context, none[0], len(self.scores))
            if chunk not in stored:  # a smaller chunk took over after memory ran out
                before, self.chunk = self.chunk, chunk
                try:
                    self.store.put(self._context, chunk, none, self._score(none, none[0]))
                finally:
                    self.chunk = before
                stored = self.store.get(self._context, none[0], len(self.scores))
            self._intact[chunk] = stored[chunk]
        scores = np.stack([values for _, values in pairs])
        intact = np.stack([self._intact[chunk] for chunk, _ in pairs])
        provenance = self.provenance | {"chunks": sorted({chunk for chunk, _ in pairs})}
        return Measurements(
            self.grid,
            masks,
            {name: scores[:, i] for i, name in enumerate(self.scores)},
            {name: intact[:, i] for i, name in enumerate(self.scores)},
            self.facts,
            provenance,
        )

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the numbers come from, JSON-ready."""
        return self._about(self._encoded.fingerprint)

    def _key(self) -> Mapping[str, object]:
        key: dict[str, object] = {"model": self.model.fingerprint, "scores": self.scores}
        key["items"] = self._encoded.fingerprint
        ablation: dict[str, str] = {"kind": self.ablation}
        if self.ablation == "mean":
            reference = encode(self.task, self.task.locate, self.model.tokenizer)
            ablation["reference"] = reference.fingerprint
        return key | {"ablation": ablation}

    def _fitting_chunk(self) -> int:
        """Choose how many masks run together from free memory and the size of one mask's rows."""
        model, encoded, grid = self.model, self._encoded, self.grid
        config = model.hf.config.get_text_config()
        n_rows, longest = len(encoded.rows), max(map(len, encoded.rows))
        tokens = n_rows * (longest - encoded.prefix)
        size = model.dtype.itemsize
        cache = 2 * grid.n_layers * grid.n_kv_heads * grid.head_width * n_rows * longest * size
        logits = encoded.positions.size * config.vocab_size * (size + 4)
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        hidden = tokens * (8 * config.hidden_size + 3 * wide) * size
        if model.device.type == "cuda":
            free = torch.cuda.mem_get_info(model.device)[0]
        else:
            free = psutil.virtual_memory().available
        busy = _BUSY_TOKENS.get(model.device.type, _BUSY_TOKENS["cpu"])
        fits = int(_MEMORY_SHARE * free / (2 * cache + logits + hidden))
        return max(1, min(fits, busy // tokens))
