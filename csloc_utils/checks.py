"""What is tried when a model is wrapped, before anyone relies on its heads.

Masking no head must change nothing, masking a head that writes something must change the logits,
and a token must not notice what comes after it.
"""

from __future__ import annotations

import torch

from csloc_utils.ablation import Ablation, forward, masked_logits
from csloc_utils.errors import InputError
from csloc_utils.models import HeadModel


def try_masks(model: HeadModel) -> None:
    """Run four short rows through the masking: see that it masks, and masks only what it should."""
    grid, vocabulary = model.grid, model.hf.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 5).remainder(vocabulary).repeat(4, 1)
    ids[3, -1] = 0  # another last token: in a causal model earlier positions must not notice
    masks = torch.zeros(4, grid.size, dtype=torch.bool)
    ones = torch.ones_like(ids)
    intact = forward(model, ids, ones, keep_values=True)
    plain = intact.logits
    kept = masked_logits(model, ids, ones, masks[:1].repeat(4, 1), Ablation(always_edit=True))
    if not torch.isfinite(plain).all():
        raise InputError(
            f"{model.name} returns numbers that are not finite in {model.dtype}: "
            "its weights are damaged, or it needs --dtype float32"
        )
    if not torch.equal(plain, kept):
        raise InputError(f"{model.name}: masking no head changes the logits; the trace is wrong")
    first = _first_active_head(model, intact.head_values)
    if first is not None:
        masks[2, first] = True
    masked = masked_logits(model, ids, ones, masks)
    if first is not None and torch.equal(masked[2], plain[2]):
        raise InputError(
            f"{model.name}: masking {grid.head(first)} at "
            f"{model.projections[first // grid.n_heads].path} changes nothing, "
            "so this module is not where the heads are joined"
        )
    if not torch.allclose(plain[0, :-1], plain[3, :-1], atol=1e-2, rtol=1e-2):
        raise InputError(f"{model.name} looks ahead (it is no causal model): csloc needs one")


def starts_late(model: HeadModel) -> bool:
    """Try whether a forward that begins at the second layer gives the same logits."""
    if model.grid.n_layers < 2:
        return False
    ids = torch.arange(1, 5).remainder(model.hf.get_input_embeddings().weight.shape[0])[None]
    ones = torch.ones_like(ids)
    whole = forward(model, ids, ones, keep_layers=True)
    try:
        late = forward(model, ids, ones, start=(1, whole.layer_inputs[1]))
    except Exception:  # layers that return more than their state: simply not skipped then
        return False
    return torch.equal(late.logits, whole.logits)


def _first_active_head(model: HeadModel, head_values: list[torch.Tensor]) -> int | None:
    """Return a head that can change the logits: it writes something, and some of it is read."""
    grid = model.grid
    for layer, (envoy, values) in enumerate(zip(model.projections, head_values, strict=True)):
        weight = envoy._module.weight
        weight = weight if hasattr(envoy._module, "nf") else weight.T
        read = weight.reshape(grid.n_heads, -1).abs().amax(1).to(values.device)
        written = values.reshape(-1, grid.n_heads, grid.head_width).abs().amax((0, 2))
        active = (read * written).nonzero()
        if len(active):
            return layer * grid.n_heads + int(active[0])
    return None
