"""Taking heads out of the weights: the edited model is an ordinary checkpoint.

The attention output projection reads every head through columns of its own. Zeroing these columns
does what zeroing the head does, so what :mod:`csloc_utils.ablation` does in a running model can be
written down once and loaded anywhere. A head's mean is a constant: it goes into the projection's
bias as ``columns @ mean``, where there is a bias. Columns times a factor weaken or strengthen the
head. No other weight is touched.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from csloc_utils.devices import DTYPES
from csloc_utils.errors import InputError
from csloc_utils.folders import check_folder, whole_folder
from csloc_utils.heads import Head, HeadGrid
from csloc_utils.model_card import check_evidence, model_card
from csloc_utils.models import HeadModel, check_config, find_projections, head_grid
from csloc_utils.sources import quiet

SHARD_SIZE = "5GB"  # of one file, unless asked otherwise


@dataclass(frozen=True)
class Change:
    """What an edit does to one layer's output projection.

    Attributes
    ----------
    path : str
        Name of the projection in the model.
    shape : tuple of int
        Of its weight, as stored (GPT-2 stores it transposed).
    heads : tuple of Head
        Heads of this layer that are edited.
    columns : tuple of int
        Inputs of the projection that these heads write, ascending.
    bias : bool
        Whether the bias changes as well.
    """

    path: str
    shape: tuple[int, ...]
    heads: tuple[Head, ...]
    columns: tuple[int, ...]
    bias: bool


@dataclass(frozen=True)
class EditPlan:
    """What an edit will write, known from the configuration alone.

    Attributes
    ----------
    heads : list of Head
        In the order in which they were named.
    changes : list of Change
        One a layer that has an edited head.
    dtype : str
        Of the written weights.
    n_bytes : int
        Their size, without small files.
    """

    heads: list[Head]
    changes: list[Change]
    dtype: str
    n_bytes: int


def plan_edit(
    config: Any,
    heads: str | Iterable[str | Head],
    *,
    mean: bool = False,
    dtype: str = "auto",
    name: str = "model",
) -> EditPlan:
    """Say what an edit will write, without loading the weights.

    Parameters
    ----------
    config : transformers configuration
    heads : str or iterable of str or Head
        Heads to edit, like ``"L13H4,L14H2"``.
    mean : bool
        Whether the heads' means will go into the biases.
    dtype : {"auto", "float32", "bfloat16", "float16"}
        "auto" keeps the checkpoint's own; float32, which holds the others exactly, where the
        configuration states none of these.
    name : str
        The model's name, for messages.

    Raises
    ------
    InputError
        For heads that are unknown or named twice, an architecture that is not supported, weights
        that are quantized, or `mean` without a bias to hold it.
    """
    check_config(config, name)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    grid = head_grid(empty, find_projections(empty, name), name)
    chosen = grid.parse(heads)
    changes = _find_changes(empty, chosen, grid.head_width, mean, name)
    own = str(getattr(config, "dtype", None)).removeprefix("torch.")
    kind = dtype if dtype != "auto" else own if own in DTYPES else "float32"
    return EditPlan(chosen, changes, kind, _size(empty, DTYPES[kind]))


@contextmanager
def edit_weights(
    model: HeadModel,
    heads: str | Iterable[str | Head],
    scale: float = 0.0,
    means: Sequence[torch.Tensor] | None = None,
) -> Iterator[HeadModel]:
    """Edit the weights of some heads for the length of a ``with`` block.

    The weights are changed in place, for a second copy of a large model would not fit, and are
    the old ones, bit for bit, when the block ends, in whatever way. Inside the block the model has
    the fingerprint of the edited weights; make evaluators for it there, not before.

    Parameters
    ----------
    model : HeadModel
    heads : str or iterable of str or Head
        Heads to edit, like ``"L13H4,L14H2"``.
    scale : float, default 0
        Factor of what the heads add: 0 switches them off, 0.5 weakens, 1.5 strengthens.
    means : sequence of torch.Tensor, optional
        One a layer, ``(n_heads * head_width,)``, as from
        :func:`csloc_utils.references.token_means`: the heads are replaced by these constants.
        Excludes a scale.

    Yields
    ------
    HeadModel
        The model that was given.

    Raises
    ------
    InputError
        As `plan_edit`; for a scale that is negative or not finite, means that do not fit the
        model, and weights that are kept out of memory.
    """
    scale, grid = check_scale(scale), model.grid
    means = _check_means(means, scale, grid)
    chosen = grid.parse(heads)
    changes = _find_changes(model.hf, chosen, grid.head_width, means is not None, model.name)
    projections = [model.hf.get_submodule(change.path) for change in changes]
    if any(projection.weight.is_meta for projection in projections):
        raise InputError(
            f"{model.name} has weights outside the memory (device map): load it on one device"
        )
    intact = model.__dict__.pop("fingerprint", None)  # cached; that of other weights from here on
    undo: list[tuple[torch.Tensor, Any, torch.Tensor]] = []  # tensor, place, what was there
    try:
        with torch.no_grad():
            for change, projection in zip(changes, projections, strict=True):
                weight = _by_inputs(projection)
                place = (slice(None), torch.tensor(change.columns, device=weight.device))
                old = weight[place]  # an index list copies
                undo.append((weight, place, old))
                if means is not None:
                    bias = projection.bias
                    undo.append((bias, slice(None), bias.clone()))
                    mean = means[change.heads[0].layer][list(change.columns)]
                    bias.copy_(bias.cpu().double() + old.cpu().double() @ mean)
                weight[place] = old * scale if scale else 0.0  # inf * 0 is no zero
        yield model
    finally:
        with torch.no_grad():
            for tensor, place, old in reversed(undo):
                tensor[place] = old
        model.__dict__.pop("fingerprint", None)
        if intact is not None:
            model.__dict__["fingerprint"] = intact


def save_edited(
    model: HeadModel,
    heads: str | Iterable[str | Head],
    out: str | os.PathLike[str],
    *,
    scale: float = 0.0,
    means: Sequence[torch.Tensor] | None = None,
    reference: str = "",
    evidence: Mapping[str, Any] | None = None,
    command: str = "",
    tokenizer: Any = None,
    max_shard_size: int | str = SHARD_SIZE,
) -> Path:
    """Write an edited model as an ordinary checkpoint with a model card.

    ``transformers.AutoModelForCausalLM.from_pretrained(out)`` loads it. It is written beside `out`
    and then renamed, so a run that is killed leaves nothing at `out`. The model is unchanged
    afterwards.

    Parameters
    ----------
    model : HeadModel
    heads, scale, means
        The edit; see `edit_weights`.
    out : str or path
        A folder that does not exist yet, or is empty.
    reference : str, optional
        What texts the means come from, for the card.
    evidence : mapping, optional
        Report of ``csloc locate`` about these heads; see
        :func:`csloc_utils.model_card.read_evidence`.
    command : str, optional
        The command that makes this edit, for the card.
    tokenizer : optional
        Tokenizer to write. By default the model's, which pads as the measurements need it: on the
        left, and with some other token where the checkpoint names none.
    max_shard_size : int or str, default "5GB"
        Largest weight file.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    InputError
        As `edit_weights`; if `out` cannot be written, or if the evidence is about other heads or
        another model.
    """
    chosen, scale = model.grid.parse(heads), check_scale(scale)
    means = _check_means(means, scale, model.grid)
    check_shard_size(max_shard_size)
    target = check_folder(out, _size(model.hf))
    if evidence is not None:
        check_evidence(evidence, chosen, model.grid, model.fingerprint)
    kind = "mean" if means is not None else "scale" if scale else "zero"
    changes = _find_changes(model.hf, chosen, model.grid.head_width, kind == "mean", model.name)
    card = model_card(
        name=model.name,
        fingerprint=model.fingerprint,
        heads=chosen,
        kind=kind,
        scale=scale,
        tensors=[t for c in changes for t in (f"{c.path}.weight", f"{c.path}.bias")[: 1 + c.bias]],
        reference=reference,
        evidence=evidence,
        command=command,
    )
    with edit_weights(model, chosen, scale, means) as edited, whole_folder(target) as folder:
        with quiet():
            edited.hf.save_pretrained(folder, max_shard_size=max_shard_size)
        (tokenizer or model.tokenizer).save_pretrained(folder)
        (folder / "README.md").write_text(card, "utf-8", errors="surrogateescape")
    return target


def check_scale(scale: float) -> float:
    """Return a factor of heads, or raise `InputError` unless it is a finite number from 0."""
    try:
        value = float(scale)
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"scale is {scale!r}: give 0 to switch off, or a number above it like 0.5")
    return value


def check_shard_size(size: int | str) -> None:
    """Raise `InputError` unless it is a size as transformers reads them."""
    good = (
        re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[KMGT]B", size) if isinstance(size, str) else size > 0
    )
    if not good:
        raise InputError(f"{size!r} is no file size: write it like 500MB or 5GB")


def _check_means(
    means: Sequence[torch.Tensor] | None, scale: float, grid: HeadGrid
) -> list[torch.Tensor] | None:
    """Return the means in double precision, or raise `InputError`."""
    if means is None:
        return None
    if scale:
        raise InputError("a head is either scaled or replaced by its mean: give scale or means")
    means = [torch.as_tensor(mean).detach().cpu().double() for mean in means]
    width = grid.n_heads * grid.head_width
    if [mean.shape for mean in means] != [(width,)] * grid.n_layers:
        raise InputError(
            f"means must be {grid.n_layers} tensors of {width} numbers, one a layer: "
            "compute them with token_means on this model"
        )
    if not all(mean.isfinite().all() for mean in means):
        raise InputError("the means hold numbers that are not finite: compute them in float32")
    return means


def _find_changes(hf: Any, heads: list[Head], width: int, mean: bool, name: str) -> list[Change]:
    """Look up the tensors that an edit changes; the model may be one without weights."""
    if getattr(hf.config, "quantization_config", None) is not None:
        raise InputError(
            f"the weights of {name} are quantized and cannot be edited: "
            "use the checkpoint that they were quantized from, or a .gguf file"
        )
    paths, changes = find_projections(hf, name), []
    for layer in sorted({head.layer for head in heads}):
        projection = hf.get_submodule(paths[layer])
        if mean and getattr(projection, "bias", None) is None:
            raise InputError(
                f"{name} ({hf.config.model_type}) has no bias at {paths[layer]} that could hold "
                "a mean: use zero ablation, or a model with this bias, such as GPT-2 or OPT"
            )
        here = tuple(head for head in heads if head.layer == layer)
        starts = sorted(head.index * width for head in here)
        columns = tuple(c for start in starts for c in range(start, start + width))
        changes.append(Change(paths[layer], tuple(projection.weight.shape), here, columns, mean))
    return changes


def _by_inputs(projection: Any) -> torch.Tensor:
    """A projection's weight as ``(outputs, inputs)``; writing to it writes to the weight."""
    weight = projection.weight.detach()
    return weight.T if hasattr(projection, "nf") else weight


def _size(hf: Any, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights; tied ones count once."""
    return sum(p.numel() * (dtype or p.dtype).itemsize for p in hf.parameters())
