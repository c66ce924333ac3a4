"""What a masked head is replaced by when it is not zero: its mean, or its value in another item."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from csloc_utils.ablation import Ablation, forward
from csloc_utils.models import HeadModel
from csloc_utils.scoring import Encoded, encode
from csloc_utils.tasks import Task


def _batches(rows: list[list[int]], size: int = 16) -> Iterator[list[list[int]]]:
    return (rows[i : i + size] for i in range(0, len(rows), size))


def token_means(model: HeadModel, task: Task) -> list[torch.Tensor]:
    """Return each head's mean over the tokens of the task's locate items, per layer ``(width,)``.

    The shared prefix is left out: it is the same text in every item.
    """
    encoded = encode(task, task.locate, model.tokenizer, model.max_length)
    rows = [encoded.rows[i] for i in encoded.item_rows]
    sums: list[torch.Tensor] = []
    count = 0
    for batch in _batches(rows):
        longest = max(map(len, batch))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
        attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
        last = attention.sum(1, keepdim=True) - 1
        run = forward(model, ids, attention, positions=last, keep_values=True)
        real = attention.bool()
        real[:, : encoded.prefix] = False
        values = [layer[real.to(layer.device)].double().sum(0) for layer in run.head_values]
        sums = [a + b for a, b in zip(sums, values)] if sums else values
        count += int(real.sum())
    return [(layer / count).to(model.dtype) for layer in sums]


def donor_values(model: HeadModel, encoded: Encoded) -> tuple[Ablation, Ablation]:
    """Return the heads' intact values in the prefix, and in each row's donor.

    A row's donor is a row of the next item in a fixed shuffled circle of the items, aligned at
    the first scored token; beyond its ends its first or last token stands in.
    """
    ids, attention = encoded.suffixes()
    n_rows, prefix = len(encoded.rows), encoded.prefix
    if prefix:
        ids = torch.cat([torch.tensor([row[:prefix] for row in encoded.rows]), ids], dim=1)
    last = attention.sum(1, keepdim=True) - 1
    run = forward(model, ids, attention, positions=last, keep_values=True)
    circle = np.random.default_rng(0).permutation(encoded.n_items)
    donor_item = np.empty_like(circle)
    donor_item[circle] = np.roll(circle, 1)
    item_of_row = np.searchsorted(encoded.item_rows, np.arange(n_rows), side="right") - 1
    donor = encoded.item_rows[donor_item[item_of_row]]
    anchor, lengths = encoded.positions.min(1), np.array([len(row) for row in encoded.rows])
    places = np.arange(prefix, ids.shape[1])[None] + (anchor[donor] - anchor)[:, None]
    places = np.clip(places, prefix, lengths[donor][:, None] - 1)
    return (
        Ablation([layer[:1, :prefix] for layer in run.head_values]),
        Ablation([layer[donor[:, None], places] for layer in run.head_values]),
    )
