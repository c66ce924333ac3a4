"""A prefix that many rows share, kept once a mask.

While decoding, attention reads the prefix once for all rows of a mask (their queries are the rows
of one product), and the softmax is taken over prefix and own text together. This replaces the
model's attention function; `can_share` tries whether the architecture lets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import sdpa_mask

from csloc_utils.ablation import forward
from csloc_utils.models import HeadModel
from csloc_utils.rows import RowTable

_NAME = "csloc_shared_prefix"


class Prefixes:
    """Keys and values of the shared prefix, once for every mask that is at work.

    Attributes
    ----------
    names : list
        The masks, in the order in which their prefixes are stored.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.names: list[int] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._groups: _Groups | None = None

    def add(self, names: Sequence[int], layers: Sequence[Any]) -> None:
        """Store the prefixes of more masks from the cache layers of a forward."""
        for parts, given in (
            (self.keys, [layer.keys for layer in layers]),
            (self.values, [layer.values for layer in layers]),
        ):
            parts[:] = [torch.cat(pair) for pair in zip(parts, given)] if self.names else given
        self.names += names

    def keep(self, names: set[int]) -> None:
        """Forget all prefixes but these masks'."""
        rows = [i for i, name in enumerate(self.names) if name in names]
        if len(rows) == len(self.names):
            return
        self.names = [self.names[i] for i in rows]
        for parts in (self.keys, self.values):
            parts[:] = [part[rows] for part in parts]

    def expand(self, names: Sequence[int]) -> Cache:
        """Return an ordinary cache in which every row holds its mask's prefix."""
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        if not self.length:
            return cache
        rows = [self.names.index(name) for name in names]
        for layer, (keys, values) in enumerate(zip(self.keys, self.values)):
            cache.update(keys[rows], values[rows], layer)
        return cache

    @contextmanager
    def attended(self, model: Any, names: Sequence[int]) -> Iterator[None]:
        """Within this block, rows that decode under these masks also attend to the prefix."""
        order = [self.names.index(name) for name in names]
        if self._groups is None or self._groups.order != (order, len(self.names)):
            self._groups = _Groups(order, len(self.names), model.device)
        config = model.hf.config
        before = config._attn_implementation
        # Registered anew: the function belongs to these prefixes.
        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(_NAME, _whole_mask)
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = before

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of one new token a row: softmax over the shared prefix and the row's own text.

        Heads that share a key/value head are rows of one product: nothing is repeated.
        """
        if query.shape[2] != 1 or any(others.get(name) is not None for name in _UNKNOWN):
            raise NotImplementedError("attention with more than scores, scale and softcap")
        rows, _, _, width = query.shape
        scaling = width**-0.5 if scaling is None else scaling
        query = (query * scaling).view(rows, key.shape[1], -1, width)
        groups, layer, length = self._groups, module.layer_idx, self.length
        early = groups.split(query) @ self.keys[layer].transpose(2, 3)
        scores = torch.cat([groups.join(early, query.shape[2]), query @ key.transpose(2, 3)], -1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~attention_mask, float("-inf"))
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
        early = groups.split(weights[..., :length]) @ self.values[layer]
        out = groups.join(early, query.shape[2]) + weights[..., length:] @ value
        return out.reshape(rows, 1, -1, value.shape[3]), None


_UNKNOWN = ("s_aux", "sinks", "position_bias", "alibi", "head_mask")


def _whole_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Boolean mask that is never left out."""
    return sdpa_mask(*args, **kwargs | dict(allow_is_causal_skip=False))


class _Groups:
    """Rows that share a prefix, brought together for one product and taken apart again."""

    def __init__(self, order: list[int], n_groups: int, device: torch.device) -> None:
        self.order, self.n_groups = (order, n_groups), n_groups
        members: list[list[int]] = [[] for _ in range(n_groups)]
        places = []
        for row, group in enumerate(order):
            places.append((group, len(members[group])))
            members[group].append(row)
        self.size = max(map(len, members))
        # Groups of different sizes are filled up with row 0; nobody reads the result.
        filled = [rows + [0] * (self.size - len(rows)) for rows in members]
        self._members = torch.tensor(filled, device=device).flatten()
        self._places = torch.tensor([g * self.size + i for g, i in places], device=device)
        # Rows usually run mask by mask: then nothing has to be moved.
        self._in_order = self._places.tolist() == list(range(n_groups * self.size))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, kv, n, width) to (groups, kv, size * n, width)."""
        x = x if self._in_order else x[self._members.to(x.device)]
        _, kv, n, width = x.shape
        x = x.reshape(self.n_groups, self.size, kv, n, width).transpose(1, 2)
        return x.reshape(self.n_groups, kv, self.size * n, width)

    def join(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """Undo `split`."""
        _, kv, _, width = x.shape
        x = x.reshape(self.n_groups, kv, self.size, n, width).transpose(1, 2)
        x = x.reshape(-1, kv, n, width)
        return x if self._in_order else x[self._places.to(x.device)]


def can_share(model: HeadModel, longest: int) -> bool:
    """Whether this model can decode with a shared prefix: tried on a few tokens, then remembered.

    Parameters
    ----------
    model : HeadModel
    longest : int
        Tokens of the longest text. A sliding window shorter than this rules sharing out.
    """
    config = model.hf.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size", "window_size"):
        if isinstance(getattr(config, name, None), int) and getattr(config, name) < longest:
            return False
    if not hasattr(model, "_shares_prefix"):
        model._shares_prefix = _try_sharing(model)
    return model._shares_prefix


def _try_sharing(model: HeadModel) -> bool:
    """Compare one step of two rows with a shared prefix with the model's own attention."""
    vocabulary = model.hf.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 13).remainder(vocabulary).view(2, 6)
    ids[1, :3] = ids[0, :3]
    ones, last = torch.ones_like(ids), torch.zeros(2, 1, dtype=torch.long)
    wanted = forward(model, ids, ones, positions=last + 5).logits
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    forward(model, ids[:, :5], ones[:, :5], positions=last, cache=cache)
    prefixes, table = Prefixes(3), RowTable(model.grid.n_layers, 2, 4, 2, before=3)
    try:
        first = [_First(layer, 3) for layer in cache.layers]
        prefixes.add([0], first)
        table.add(cache.layers, 3, [2, 2])
        with prefixes.attended(model, [0, 0]):
            got = forward(model, ids[:, 5:], ones, positions=last, cache=table.cache).logits
    except Exception:  # attention of another kind: every row then holds its own prefix
        return False
    # Where an architecture ignores the replaced attention, the prefix is missing.
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-4}.get(model.dtype, 5e-2)
    return bool((got - wanted).abs().max() <= tolerance * wanted.abs().max())


class _First:
    """The first row's prefix in a cache layer."""

    def __init__(self, layer: Any, length: int) -> None:
        self.keys, self.values = layer.keys[:1, :, :length], layer.values[:1, :, :length]
