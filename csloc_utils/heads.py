"""Names for attention heads.

A model has `n_layers` × `n_heads` *query* heads. `Head` names one of them, as in ``L16H21``;
`HeadGrid` knows how many there are, which share a key/value head, and where each one stands in
the flat order that every mask and every coefficient vector of this package uses:
``flat = layer * n_heads + index``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from csloc_utils.errors import InputError

_HEAD = re.compile(r"L(\d+)H(\d+)", re.ASCII)


@dataclass(frozen=True, order=True)
class Head:
    """One query head of a model: its layer and its index in that layer, both from 0."""

    layer: int
    index: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.index}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Read a head from its name, for example ``L16H21``.

        Raises
        ------
        InputError
            If `text` is not a head's name.
        """
        match = _HEAD.fullmatch(text.strip()) if isinstance(text, str) else None
        if not match:
            raise InputError(f"{text!r} is not a head: write layer and head like L16H21")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class HeadGrid:
    """The query heads of a model.

    Parameters
    ----------
    n_layers, n_heads : int
        Layers, and query heads in each.
    n_kv_heads : int
        Key/value heads in each layer; consecutive query heads share one (grouped-query
        attention). Equal to `n_heads` without sharing, 1 for multi-query attention.
    head_width : int
        Numbers a head writes for each token (``head_dim``).
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_width: int

    def __post_init__(self) -> None:
        if min(self.n_layers, self.n_heads, self.n_kv_heads, self.head_width) < 1:
            raise InputError(f"a head grid needs positive sizes, not {self}")
        if self.n_heads % self.n_kv_heads:
            raise InputError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} key/value heads evenly"
            )

    @property
    def size(self) -> int:
        """Number of query heads in the whole model."""
        return self.n_layers * self.n_heads

    @property
    def shape(self) -> tuple[int, int]:
        """``(n_layers, n_heads)``, the shape of a head map."""
        return self.n_layers, self.n_heads

    @property
    def heads(self) -> list[Head]:
        """All heads in flat order."""
        return [self.head(i) for i in range(self.size)]

    def head(self, flat: int) -> Head:
        """Return the head at a flat index."""
        if not isinstance(flat, Integral) or not 0 <= flat < self.size:
            raise InputError(f"flat index {flat} is outside 0 … {self.size - 1}")
        return Head(*divmod(int(flat), self.n_heads))

    def flat(self, head: Head) -> int:
        """Return the flat index of a head."""
        self.check(head)
        return head.layer * self.n_heads + head.index

    def kv_group(self, head: Head) -> int:
        """Return which key/value head of its layer `head` reads from."""
        self.check(head)
        return head.index // (self.n_heads // self.n_kv_heads)

    def check(self, head: Head) -> Head:
        """Return `head` unchanged, or raise `InputError` if the model does not have it."""
        if not isinstance(head, Head):
            raise InputError(f"{head!r} is no Head: write Head(13, 4), or use grid.parse('L13H4')")
        if not (0 <= head.layer < self.n_layers and 0 <= head.index < self.n_heads):
            raise InputError(
                f"{head} does not exist: this model has layers 0 … {self.n_layers - 1} "
                f"with heads 0 … {self.n_heads - 1}"
            )
        return head

    def parse(self, text: str | Iterable[str]) -> list[Head]:
        """Read heads from ``"L13H4,L14H2"`` or a list of names, keeping their order.

        Raises
        ------
        InputError
            If a name is malformed, outside the grid or given twice, or if there is none.
        """
        names = text.split(",") if isinstance(text, str) else list(text)
        heads = [self.check(n if isinstance(n, Head) else Head.parse(n)) for n in names]
        for head in heads:
            if heads.count(head) > 1:
                raise InputError(f"{head} is given twice: name each head once")
        if not heads:
            raise InputError("no head given: name at least one, like L13H4,L14H2")
        return heads

    def mask(self, heads: Iterable[Head]) -> np.ndarray:
        """Return a bool array ``(size,)`` that is True at `heads` (True = ablated)."""
        if isinstance(heads, (Head, str)):
            raise InputError(f"give a list of heads, not {heads!r} alone")
        mask = np.zeros(self.size, bool)
        mask[[self.flat(head) for head in heads]] = True
        return mask

    def single_masks(self) -> np.ndarray:
        """Return the one-at-a-time design: ``(size, size)`` bool, the identity."""
        return np.eye(self.size, dtype=bool)

    def check_masks(self, masks: np.ndarray) -> np.ndarray:
        """Return `masks` as a bool array ``(n_masks, size)``, or raise `InputError`.

        A single mask ``(size,)`` is taken as one row. Entries must be bool, or numbers that are
        all 0 or 1.
        """
        try:
            masks = np.atleast_2d(np.asarray(masks))
        except ValueError as error:
            raise InputError("masks have rows of different lengths: give one per head") from error
        if masks.ndim != 2 or masks.shape[1] != self.size or not len(masks):
            raise InputError(
                f"masks have shape {masks.shape}, expected (n_masks, {self.size}): "
                f"one column per head of a {self.n_layers} × {self.n_heads} model"
            )
        if masks.dtype != bool and not np.isin(masks, (0, 1)).all():
            raise InputError("masks must be bool (True = ablated), or 0 and 1")
        return masks.astype(bool)
