"""Key/value memory of rows that decode together, one column a step.

Rows are *right-aligned*: whatever its length, a row's last token stands in the last column, so that
distances between columns are distances in the text (which is what sliding windows measure) and a
step adds one column for all rows, in place. A row that ends is overwritten by the last one, a new
one is written behind the others; nothing else moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class RowTable:
    """Keys and values of the running rows.

    Parameters
    ----------
    n_layers, rows, columns : int
        Size; `columns` has room for the longest row.
    begin : int
        Column at which the first texts end: the longest row to be added.
    before : int
        Length of a prefix that is kept elsewhere and that all rows begin with.

    Attributes
    ----------
    cache : transformers.Cache
        To be given to the model; a forward of one token a row writes into it. Call `advance` after.
    lengths : list of int
        Columns that each running row takes.
    """

    def __init__(self, n_layers: int, rows: int, columns: int, begin: int, before: int = 0) -> None:
        self.rows, self.columns, self.begin, self.before = rows, columns, begin, before
        self.end = begin
        self.lengths: list[int] = []
        self.cache = Cache(layers=[_Columns(self) for _ in range(n_layers)])

    @property
    def start(self) -> int:
        """First column that a running row uses."""
        return self.end - max(self.lengths, default=0)

    def attention_mask(self) -> torch.Tensor:
        """Which columns each row reads in the next step, ``(rows, before + columns)``."""
        width = self.end - self.start
        lengths = torch.tensor(self.lengths)[:, None]
        own = torch.arange(width + 1) >= width - lengths
        return torch.cat([torch.ones(len(own), self.before, dtype=torch.bool), own], 1).long()

    def add(self, layers: Sequence[Any], skip: int, lengths: Sequence[int]) -> None:
        """Add rows from the cache layers of a right-padded forward.

        Parameters
        ----------
        layers : sequence
            With ``keys`` and ``values`` of shape ``(rows, kv heads, skip + tokens, width)``.
        skip : int
            Leading columns that are not copied.
        lengths : sequence of int
            Columns that each row takes after those.
        """
        if not self.lengths:
            self.end = self.begin
        first, width = len(self.lengths), max(lengths)
        places = torch.arange(width) + (torch.tensor(lengths)[:, None] - width)
        places = (places.clamp(min=0) + skip)[:, None, :, None]
        for mine, theirs in zip(self.cache.layers, layers, strict=True):
            mine.allocate(theirs.keys, theirs.values)
            for to, given in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                index = places.to(given.device).expand(-1, given.shape[1], -1, given.shape[3])
                rows = slice(first, first + len(given))
                to[rows, :, self.end - width : self.end] = given.gather(2, index)
        self.lengths += lengths

    def advance(self) -> None:
        """Count the column that a forward has just written; make room for the next one."""
        self.end += 1
        self.lengths = [length + 1 for length in self.lengths]
        if self.end < self.columns:
            return
        width = max(self.lengths)
        end = max(width, self.begin)
        for layer in self.cache.layers:
            for part in (layer.keys, layer.values):
                part[:, :, end - width : end] = part[:, :, self.end - width : self.end].clone()
        self.end = end

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last, start = len(self.lengths) - 1, self.start
        for layer in self.cache.layers:
            for part in (layer.keys, layer.values):
                part[row, :, start : self.end] = part[last, :, start : self.end]
        self.lengths[row] = self.lengths[-1]
        self.lengths.pop()


class _Columns(DynamicLayer):
    """One layer of a `RowTable`."""

    def __init__(self, table: RowTable) -> None:
        super().__init__()
        self.table, self.is_initialized = table, True

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.keys is None:
            # Zeros: what is masked out has weight 0, and 0 times an accidental NaN is NaN.
            size = (self.table.rows, keys.shape[1], self.table.columns)
            self.keys = keys.new_zeros(*size, keys.shape[3])
            self.values = values.new_zeros(*size, values.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, start, end = len(self.table.lengths), self.table.start, self.table.end
        parts = []
        for part, new in ((self.keys, key_states), (self.values, value_states)):
            part[:rows, :, end : end + 1] = new
            parts.append(part[:rows, :, start : end + 1])
        return parts[0], parts[1]

    def get_seq_length(self) -> int:
        return self.table.before + self.table.end - self.table.start
