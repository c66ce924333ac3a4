"""The layers before the first ablated head, run once instead of once a mask.

Up to the layer in which a mask first differs from another one, its *base*, the model does what it
does under the base. `BaseRun` keeps the base's state at the entry of every layer, so that a masked
forward can begin further up. In a sweep the base is the intact model, in a round of greedy search
the heads found so far. The numbers are the same to the last bit; either takes half the work.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from csloc_utils.ablation import Ablation, forward
from csloc_utils.models import HeadModel
from csloc_utils.scoring import Encoded

# Layers to be saved before it pays to keep the base's states.
WORTH_SKIPPING = 2


class BaseRun:
    """The model's way through the shared prefix and the items, with the heads of one mask off.

    Parameters
    ----------
    model : HeadModel
    encoded : Encoded
    mask : bool array (n_heads,)
        The base; all False for the intact model.
    for_prefix, for_items : Ablation
        What its heads become.
    """

    def __init__(
        self,
        model: HeadModel,
        encoded: Encoded,
        mask: np.ndarray,
        for_prefix: Ablation,
        for_items: Ablation,
    ) -> None:
        self.mask = mask
        self._cache, self._prefix = None, []
        if encoded.prefix:
            ids = torch.tensor([encoded.rows[0][: encoded.prefix]])
            last = torch.full((1, 1), encoded.prefix - 1)
            ones = torch.ones_like(ids)
            run = forward(
                model, ids, ones, mask[None], for_prefix, last, keep_cache=True, keep_layers=True
            )
            self._cache, self._prefix = run.cache, run.layer_inputs
        cache = copy.deepcopy(self._cache)
        if cache is not None:
            cache.batch_repeat_interleave(len(encoded.rows))
        ids, attention = encoded.suffixes()
        places = torch.from_numpy(encoded.positions - encoded.prefix)
        masks = mask[None].repeat(len(ids), axis=0)
        run = forward(
            model, ids, attention, masks, for_items, places, cache=cache, keep_layers=True
        )
        self._items = run.layer_inputs

    def in_prefix(self, first: int, n_masks: int) -> tuple[int, torch.Tensor]:
        """Where a forward of the prefix begins, for `ablation.forward`."""
        return first, self._prefix[first].repeat(n_masks, 1, 1)

    def in_items(self, first: int, n_masks: int) -> tuple[int, torch.Tensor]:
        """Where a forward of the items begins, masks outermost."""
        return first, self._items[first].repeat(n_masks, 1, 1)

    def complete(self, cache: Any, first: int, n_masks: int) -> None:
        """Put the layers that a late start left out of a prefix cache into it."""
        for layer in range(first):
            cache.layers[layer] = copy.deepcopy(self._cache.layers[layer])
            cache.layers[layer].batch_repeat_interleave(n_masks)
