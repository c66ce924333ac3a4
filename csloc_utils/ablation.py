"""Switching heads off, row by row, inside one nnsight trace.

A head is its slice of the *input* of the attention output projection. Every row of a batch has
its own mask, so one forward scores many masks at once. The masked slice is filled, never
multiplied (``inf * 0`` is NaN), with

- zero (``zero``),
- the head's mean over reference texts (``mean``), or
- the head's value in another text, its donor, at the same place (``resample``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from csloc_utils.errors import InputError

KINDS = ("zero", "mean", "resample")


@dataclass(frozen=True)
class Ablation:
    """What a masked head is replaced by.

    Parameters
    ----------
    values : sequence of torch.Tensor or None
        One tensor per layer, ``(n_heads * head_width,)`` or ``(n_rows, tokens, n_heads *
        head_width)``: the values that masked heads take; a batch of several masks repeats the
        rows. None: zero.
    always_edit : bool
        Write the projection's input even in layers where no row has a masked head (used to check
        that the writing itself changes nothing).
    """

    values: Sequence[torch.Tensor] | None = None
    always_edit: bool = False


@dataclass
class Forward:
    """What a masked forward returns."""

    logits: torch.Tensor
    cache: Any = None
    head_values: list[torch.Tensor] = field(default_factory=list)
    layer_inputs: list[torch.Tensor] = field(default_factory=list)


def masked_logits(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    masks: torch.Tensor | np.ndarray | None = None,
    ablation: Ablation | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the model with some heads off, each row with its own mask.

    Parameters
    ----------
    model : HeadModel
    input_ids : LongTensor, shape (rows, tokens)
    attention_mask : LongTensor, shape (rows, tokens), optional
        1 for text, 0 for padding (on either side). May be left out only when nothing is padded.
    masks : bool array, shape (rows, n_heads), optional
        True = ablated. None: the intact model.
    ablation : Ablation, optional
        What replaces a masked head; zero by default.
    positions : LongTensor, shape (rows, n), optional
        Score only these positions of each row; all by default.

    Returns
    -------
    torch.Tensor, shape (rows, tokens or n, vocabulary)

    Raises
    ------
    InputError
        If ids hold padding and no attention mask says where.
    """
    if attention_mask is None:
        padding = model.tokenizer.pad_token_id
        if (input_ids[:, [0, -1]] == padding).any() and len(input_ids) > 1:
            raise InputError(
                "the ids begin or end with the padding token and no attention mask was given: "
                "pass attention_mask, or the model attends to the padding"
            )
        attention_mask = torch.ones_like(input_ids)
    return forward(model, input_ids, attention_mask, masks, ablation, positions).logits


def forward(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    masks: torch.Tensor | np.ndarray | None = None,
    ablation: Ablation | None = None,
    positions: torch.Tensor | None = None,
    *,
    cache: Any = None,
    keep_cache: bool = False,
    keep_values: bool = False,
    keep_layers: bool = False,
    start: tuple[int, torch.Tensor] | None = None,
) -> Forward:
    """Run one masked forward; `masked_logits` with what the measuring engine needs besides.

    Parameters
    ----------
    cache : optional
        Key/value cache of a text that precedes `input_ids`; `attention_mask` then covers both.
        It grows by this forward: pass a copy to use it again.
    keep_cache, keep_values, keep_layers : bool
        Return the grown cache; every layer's heads (the projection's input); every layer's input.
    start : (int, torch.Tensor), optional
        Begin at this layer with this input ``(rows, tokens, hidden)``: the layers before it are
        not run, and what they would have added to the cache is missing from it.
    """
    device, (rows, tokens) = model.device, input_ids.shape
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    ablation = ablation or Ablation()
    off = _widen(model, masks, rows)
    edited = [
        layer
        for layer in range(model.grid.n_layers)
        if off is not None and (ablation.always_edit or off[:, layer].any())
    ]
    options: dict[str, Any] = {"use_cache": keep_cache or cache is not None}
    if cache is not None:
        options[model.cache_argument] = cache
    if model.takes_positions:
        # Real tokens count from 0 whatever the padding; padding gets any valid position.
        places = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
        options["position_ids"] = places
    # Only scored positions reach the output head: it is the widest matrix of a small model.
    scored = None if positions is None else positions.to(device)[:, :, None]
    seen: list[torch.Tensor] = []
    entered: list[torch.Tensor] = []
    first, hidden_states = start or (0, None)
    grown = None  # names first bound inside a trace are gone after it, unless saved
    with (
        torch.no_grad(),
        model.nn.trace(dict(input_ids=input_ids, attention_mask=attention_mask), **options),
    ):
        for layer in range(first):
            model.layers[layer].skip(hidden_states)
        for layer in range(first, model.grid.n_layers):
            projection = model.projections[layer]
            if keep_layers:
                entered.append(model.layers[layer].input.clone())
            if keep_values:
                seen.append(projection.input.clone())
            if layer in edited:
                heads = projection.input
                projection.input = _fill(heads, off[:, layer], ablation, layer)
        if scored is not None:
            hidden = model.unembedding.input
            model.unembedding.input = hidden.gather(1, scored.expand(-1, -1, hidden.shape[-1]))
        output = model.nn.output
        logits = output.logits.save()
        if keep_cache:
            grown = output[model.cache_argument].save()
    return Forward(logits, grown, seen, entered)


def _widen(model: Any, masks: torch.Tensor | np.ndarray | None, rows: int) -> torch.Tensor | None:
    """Spread masks ``(rows, n_heads)`` over the heads' columns: ``(rows, n_layers, width)``."""
    if masks is None:
        return None
    grid = model.grid
    checked = grid.check_masks(np.asarray(masks))
    if len(checked) != rows:
        raise InputError(f"{len(checked)} masks for {rows} rows: give each row its own mask")
    off = torch.from_numpy(checked).view(rows, *grid.shape)
    return off.repeat_interleave(grid.head_width, dim=2).to(model.device)


def _fill(heads: torch.Tensor, off: torch.Tensor, ablation: Ablation, layer: int) -> torch.Tensor:
    """Replace the columns of masked heads in a projection's input ``(rows, tokens, width)``."""
    off = off[:, None].to(heads.device)  # layers may sit on different devices
    if ablation.values is None:
        return heads.masked_fill(off, 0)
    values = ablation.values[layer].to(heads)
    if values.ndim == 3 and len(values) > 1:  # one per item, in the order of every mask's rows
        values = values.repeat(len(heads) // len(values), 1, 1)
    return torch.where(off, values, heads)
