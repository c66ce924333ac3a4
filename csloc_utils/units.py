"""Is a head the right unit? The same protocol on attention blocks, MLP blocks and whole layers.

A `UnitEvaluator` is an `Evaluator` whose masks have one column a layer. A column switches off all
heads of the layer (``attention``), what its MLP adds to the residual stream (``mlp``), or both
(``layer``). Searches, measures of sparsity and tests of additivity run on it unchanged.

A layer that is off still adds the bias of its attention output projection, where there is one, as a
head's ablation leaves it in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid
from csloc_utils.measure import Evaluator
from csloc_utils.models import HeadModel
from csloc_utils.reuse import BaseRun
from csloc_utils.scoring import combine, probe_logits
from csloc_utils.tasks import Task

UNITS = {"attention": "ATT", "mlp": "MLP", "layer": "LAYER"}
# What architectures call the block, and OPT's last matrix, which has no block around it.
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "fc2")


@dataclass(frozen=True, order=True)
class Unit(Head):
    """One block of one layer, printed like ``MLP7``."""

    kind: str = "layer"

    def __str__(self) -> str:
        return f"{UNITS[self.kind]}{self.layer}"


@dataclass(frozen=True)
class UnitGrid(HeadGrid):
    """The units of a model: a grid with one column."""

    kind: str = "layer"

    def head(self, flat: int) -> Unit:
        """Return the unit at a flat index."""
        return Unit(super().head(flat).layer, 0, self.kind)


class UnitEvaluator(Evaluator):
    """Scores masks of whole blocks of one model on one set of items.

    Parameters
    ----------
    model : HeadModel
    task : Task
    split, n_items
        As of an `Evaluator`.
    unit : {"attention", "mlp", "layer"}
        What a column of a mask switches off; masks are ``(n_masks, n_layers)``. Ablation is zero.
    **options
        ``store``, ``chunk``, ``progress`` and ``items`` of an `Evaluator`.

    Raises
    ------
    InputError
        As an `Evaluator`; for an unknown unit, or a model whose MLP is not found.
    """

    def __init__(
        self,
        model: HeadModel,
        task: Task,
        split: str = "locate",
        n_items: int | None = None,
        *,
        unit: str = "mlp",
        **options: Any,
    ) -> None:
        if unit not in UNITS:
            raise InputError(f"unknown unit {unit!r}: choose from {', '.join(UNITS)}")
        if options.get("ablation", "zero") != "zero":
            raise InputError("blocks know zero ablation only: leave the ablation out")
        self.unit = unit
        self._mlps = [] if unit == "attention" else find_mlps(model)
        super().__init__(model, task, split, n_items, **options)
        self.grid = UnitGrid(model.grid.n_layers, 1, 1, model.grid.head_width, unit)

    def part(self, rows: np.ndarray) -> UnitEvaluator:
        """Return an evaluator of these of the items only, which counts by itself."""
        return UnitEvaluator(
            self.model,
            self.task,
            self.split,
            unit=self.unit,
            store=self.store,
            progress=self.progress,
            items=tuple(self.items[row] for row in rows),
        )

    def slopes(self, *args: Any, **options: Any) -> Any:
        """Refuse: there are few enough units to measure each."""
        raise InputError("blocks have no slopes: use sweep, greedy or paper, not screened")

    def _key(self) -> dict[str, Any]:
        return super()._key() | {"unit": self.unit}

    def _depth(self, mask: np.ndarray, base: np.ndarray) -> int:
        """Return the first layer with a block off: every mask leaves the intact model's way."""
        off = np.flatnonzero(mask)
        return int(off[0]) if len(off) else self.grid.n_layers

    def _base_run(self, base: np.ndarray) -> BaseRun:
        return super()._base_run(np.zeros(self.model.grid.size, bool))

    def _score(self, masks: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Run one chunk of masks: ``(n_masks, n_scores, n_items)``."""
        filled = np.zeros((self.chunk, self.grid.size), bool)  # same shape for every chunk
        filled[: len(masks)] = masks
        encoded, chunk, off = self._encoded, self.chunk, torch.from_numpy(filled)
        n_rows = len(encoded.rows)
        first = self._first_layer(masks, base)
        begun = self._base_run(base) if first else None
        cache = None
        if encoded.prefix:
            ids = torch.tensor(encoded.rows[0][: encoded.prefix]).repeat(chunk, 1)
            last = torch.full((chunk, 1), encoded.prefix - 1)
            start = begun.in_prefix(first, chunk) if begun else None
            _, cache = self._forward(ids, torch.ones_like(ids), last, off, start=start)
            if begun:
                begun.complete(cache, first, chunk)
            cache.batch_repeat_interleave(n_rows)
        start = begun.in_items(first, chunk) if begun else None
        ids, attention = (part.repeat(chunk, 1) for part in self._suffixes)
        places = torch.from_numpy(encoded.positions - encoded.prefix).repeat(chunk, 1)
        rows = off.repeat_interleave(n_rows, dim=0)
        logits, _ = self._forward(ids, attention, places, rows, cache=cache, start=start)
        scores = combine(encoded, *probe_logits(encoded, logits))
        return np.stack([scores[name] for name in self.scores], axis=1)[: len(masks)]

    def _forward(
        self,
        ids: torch.Tensor,
        attention: torch.Tensor,
        places: torch.Tensor,
        off: torch.Tensor,
        *,
        cache: Any = None,
        start: tuple[int, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run rows ``(rows, tokens)``, each with its own blocks off ``(rows, n_layers)``.

        As `csloc_utils.ablation.forward`, which does this for heads. Returns logits and cache.
        """
        model, device, tokens = self.model, self.model.device, ids.shape[1]
        ids, attention, off = ids.to(device), attention.to(device), off.to(device)
        options: dict[str, Any] = {"use_cache": True}
        if cache is not None:
            options[model.cache_argument] = cache
        if model.takes_positions:
            options["position_ids"] = (attention.cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
        scored = places.to(device)[:, :, None]
        first, entered = start or (0, None)
        with (
            torch.no_grad(),
            model.nn.trace(dict(input_ids=ids, attention_mask=attention), **options),
        ):
            for layer in range(first):
                model.layers[layer].skip(entered)
            for layer in range(first, self.grid.n_layers):
                rows = off[:, layer]
                if self.unit != "mlp" and rows.any():
                    projection = model.projections[layer]
                    projection.input = _zero(projection.input, rows)
                if self.unit != "attention" and rows.any():
                    mlp = self._mlps[layer]
                    mlp.output = _zero(mlp.output, rows)
            hidden = model.unembedding.input
            model.unembedding.input = hidden.gather(1, scored.expand(-1, -1, hidden.shape[-1]))
            output = model.nn.output
            logits = output.logits.save()
            grown = output[model.cache_argument].save()
        return logits, grown


def find_mlps(model: HeadModel) -> list[Any]:
    """Return every layer's MLP as a traced module, or raise `InputError`."""
    found = []
    for i, layer in enumerate(model.layers):
        names = [name for name in _MLP_NAMES if hasattr(layer._module, name)]
        if not names:
            raise InputError(
                f"layer {i} of {model.name} has no MLP under a known name "
                f"({', '.join(_MLP_NAMES)}): use unit='attention'"
            )
        found.append(getattr(layer, names[0]))
    return found


def unit_parameters(model: HeadModel) -> dict[str, float]:
    """Millions of parameters of one unit of each kind, averaged over layers.

    A head's are its share of the attention block: grouped key/value heads are divided up.
    """

    def millions(module: Any) -> float:
        return sum(p.numel() for p in module.parameters()) / 1e6

    layers = [layer._module for layer in model.layers]
    mlp = np.mean([millions(mlp._module) for mlp in find_mlps(model)])
    attention = np.mean([millions(_attention(model, i)) for i in range(len(layers))])
    return {
        "head": float(attention / model.grid.n_heads),
        "attention": float(attention),
        "mlp": float(mlp),
        "layer": float(np.mean([millions(layer) for layer in layers])),
    }


def _attention(model: HeadModel, layer: int) -> Any:
    """Return the module that holds a layer's output projection."""
    wanted = model.projections[layer]._module
    block = model.layers[layer]._module
    holders = [m for m in block.modules() if any(child is wanted for child in m.children())]
    return holders[0]


def _zero(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Zero some rows of a block's values, ``(rows, tokens, width)``; OPT joins the first two."""
    off = rows.to(values.device)
    if values.ndim == 2:
        return values.masked_fill(off.repeat_interleave(len(values) // len(off))[:, None], 0)
    return values.masked_fill(off[:, None, None], 0)
