"""Every head's first-order effect from one backward pass.

Give each head a *keep-strength* ``c`` that scales its output: 1 leaves it as it is, 0 replaces it
as an ablation would. The slope of the score along ``c`` says what a small step towards ablation
does, and minus the slope is a guess of what the whole step does: all heads at once, for the price
of one forward and one backward. Where the score bends on the way, the guess is wrong. It may order
the candidates; it never convicts a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from csloc_utils.ablation import Ablation
from csloc_utils.errors import InputError
from csloc_utils.models import HeadModel
from csloc_utils.scoring import Encoded

SMOOTH_SCORES = ("logprob", "margin")


@dataclass(frozen=True)
class Slopes:
    """First-order effects of every head at some points.

    Attributes
    ----------
    masks : bool array (n_masks, n_heads)
        Heads that are off at each point.
    strength : float
        Keep-strength of all others.
    effects : float array (n_masks, n_heads)
        Minus the slope of the mean score along each head's keep-strength, in units of the score:
        what ablating the head would do if the score were a straight line. For a head that is off,
        the same line drawn from its other end.
    score : str
    """

    masks: np.ndarray
    strength: float
    effects: np.ndarray
    score: str


def slope_point(mask: np.ndarray, strength: float, score: str) -> str:
    """Name of a point at which slopes are taken, for stores and records."""
    return f"{score} {strength:g} {np.packbits(mask).tobytes().hex()}"


def score_slopes(
    model: HeadModel,
    encoded: Encoded,
    mask: np.ndarray,
    strength: float,
    ablations: tuple[Ablation, Ablation],
    score: str,
) -> np.ndarray:
    """Return the slope of the mean score along every head's keep-strength, ``(n_heads,)``.

    The shared prefix is run once, and the gradient flows back through its cache as well.

    Parameters
    ----------
    ablations : (Ablation, Ablation)
        What a head becomes at strength 0, in the prefix and in the items.
    """
    keep = torch.where(torch.from_numpy(mask), 0.0, float(strength)).requires_grad_()
    cache, prefix = None, encoded.prefix
    if prefix:
        ids = torch.tensor([encoded.rows[0][:prefix]])
        last = torch.full((1, 1), prefix - 1)
        cache = _run(model, ids, torch.ones_like(ids), keep, ablations[0], last, None)[1]
        cache.batch_repeat_interleave(len(encoded.rows))
    ids, attention = encoded.suffixes()
    places = torch.from_numpy(encoded.positions - prefix)
    logits = _run(model, ids, attention, keep, ablations[1], places, cache)[0]
    (slopes,) = torch.autograd.grad(mean_score(encoded, logits, score), keep)
    if not torch.isfinite(slopes).all():
        raise InputError(
            f"the gradient is not finite in {model.dtype}: try --dtype float32, or a method "
            "without gradients"
        )
    return slopes.double().numpy()


def _run(
    model: HeadModel,
    ids: torch.Tensor,
    attention: torch.Tensor,
    keep: torch.Tensor,
    ablation: Ablation,
    places: torch.Tensor,
    cache: Any,
) -> tuple[torch.Tensor, Any]:
    """Run with scaled heads and the graph kept; return logits at `places` and the grown cache."""
    device, tokens = model.device, ids.shape[1]
    ids, attention = ids.to(device), attention.to(device)
    wide = keep.view(model.grid.shape).repeat_interleave(model.grid.head_width, dim=1)
    options: dict[str, Any] = {"use_cache": True}
    if cache is not None:
        options[model.cache_argument] = cache
    if model.takes_positions:
        options["position_ids"] = (attention.cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
    scored = places.to(device)[:, :, None]
    with model.nn.trace(dict(input_ids=ids, attention_mask=attention), **options):
        for layer, projection in enumerate(model.projections):
            projection.input = _scale(projection.input, wide[layer], ablation, layer)
        hidden = model.unembedding.input
        model.unembedding.input = hidden.gather(1, scored.expand(-1, -1, hidden.shape[-1]))
        output = model.nn.output
        logits = output.logits.save()
        grown = output[model.cache_argument].save()
    return logits, grown


def _scale(heads: torch.Tensor, keep: torch.Tensor, ablation: Ablation, layer: int) -> torch.Tensor:
    keep = keep.to(heads)
    if ablation.values is None:
        return heads * keep
    values = ablation.values[layer].to(heads)
    return values + (heads - values) * keep


def mean_score(encoded: Encoded, logits: torch.Tensor, score: str) -> torch.Tensor:
    """Mean over items of a smooth score, for one mask and with its graph.

    The same numbers as `csloc_utils.scoring.combine`, which knows the definitions.

    Raises
    ------
    InputError
        If the score has no gradient.
    """
    if score not in SMOOTH_SCORES:
        raise InputError(
            f"the score {score!r} moves in steps and has no gradient: use "
            f"{' or '.join(SMOOTH_SCORES)}"
        )
    row, slot, token = torch.from_numpy(encoded.probes).to(logits.device).unbind(1)
    asked = logits[row, slot].float()
    own = asked.gather(1, token[:, None])[:, 0]
    if score == "margin" and encoded.scoring != "choice":
        best = asked.topk(2).values
        value = own - torch.where(own == best[:, 0], best[:, 1], best[:, 0])
    else:
        value = own - asked.logsumexp(-1)
    least = score == "margin" and encoded.scoring == "continuation"
    answers = [
        part.min() if least else part.mean() if encoded.scoring == "text" else part.sum()
        for part in value.tensor_split(encoded.answer_starts[1:].tolist())
    ]
    items = torch.stack(answers).tensor_split(encoded.item_starts[1:].tolist())
    if encoded.scoring == "choice":
        pairs = zip(items, encoded.correct.tolist(), strict=True)
        return torch.stack([_beside(part, right, score) for part, right in pairs]).mean()
    return torch.stack([part.max() if least else part.logsumexp(0) for part in items]).mean()


def _beside(choices: torch.Tensor, right: int, score: str) -> torch.Tensor:
    """Score the right choice against all (log-probability) or against the best other (margin)."""
    others = torch.cat([choices[:right], choices[right + 1 :]])
    return choices[right] - (others.max() if score == "margin" else choices.logsumexp(0))
