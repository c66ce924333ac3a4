"""Greedy decoding under many masks at once.

A *row* is one item under one mask. All rows of all masks decode together, each with its own heads
off at every step. The prefix that all prompts share (few-shot examples) is run once a mask. A row
that ends leaves the batch at once, and waiting rows take the free places. What comes out is what
decoding every row alone would write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from csloc_utils.ablation import Ablation
from csloc_utils.decoding import Run
from csloc_utils.designs import check_count
from csloc_utils.errors import InputError
from csloc_utils.models import HeadModel


@dataclass(frozen=True)
class Generated:
    """What was written, as nested lists ``[mask][item]``.

    Attributes
    ----------
    ids : list of list of list of int
        New token ids; the end-of-text token, or the token that completed a stop string, is the
        last of them.
    texts : list of list of str
        The same as text, without special tokens, cut before the stop string.
    endings : list of list of str
        Why each row ended: ``"eos"``, ``"stop"`` or ``"length"``.
    batch_rows : int
        Rows that decoded together at the end (fewer than at first if memory ran out).
    """

    ids: list[list[list[int]]]
    texts: list[list[str]]
    endings: list[list[str]]
    batch_rows: int


def generate(
    model: HeadModel,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    masks: np.ndarray,
    *,
    ablation: Ablation | None = None,
    max_new_tokens: int = 20,
    stop: Sequence[str] = (),
    batch_rows: int | None = None,
    progress: bool | None = None,
) -> Generated:
    """Continue every prompt greedily under every mask.

    Plain greedy decoding: sampling settings and penalties of the model's generation config are
    not applied; its end-of-text tokens are.

    Parameters
    ----------
    model : HeadModel
    prompts : sequence of str, or of sequences of int
        Texts to be continued, or their token ids; see `chat_prompt` for a question to a chat.
    masks : bool array (n_masks, n_heads)
        True = ablated, in the prompt and at every step.
    ablation : Ablation, optional
        Zero (default) or mean ablation.
    max_new_tokens : int, default 20
    stop : sequence of str
        A row also ends when its new text contains one of these.
    batch_rows : int, optional
        Rows that decode together; from free memory by default, and halved when memory runs out.
    progress : bool, optional
        Show a progress bar; by default only on a terminal.

    Returns
    -------
    Generated

    Raises
    ------
    InputError
        If a prompt is empty, begins with the start token twice, holds unknown ids or does not fit
        the model's context with `max_new_tokens`; if the logits are not finite; or if not even
        one row fits into memory.
    """
    masks = model.grid.check_masks(masks)
    ablation = ablation or Ablation()
    prompts = _check(model, prompts, ablation, max_new_tokens, stop)
    if batch_rows is not None:
        check_count("batch_rows", batch_rows)
    bar = tqdm(
        total=len(masks) * len(prompts),
        unit="text",
        desc="generate",
        disable=None if progress is None else not progress,
    )
    with bar:
        run = Run(model, prompts, masks, ablation, max_new_tokens, tuple(stop), batch_rows, bar)
        rows = run.finish()
    table = [rows[i : i + len(prompts)] for i in range(0, len(rows), len(prompts))]
    return Generated(
        ids=[[row.new for row in part] for part in table],
        texts=[[row.text for row in part] for part in table],
        endings=[[row.ending for row in part] for part in table],
        batch_rows=run.batch_rows,
    )


def chat_text(tokenizer: Any, text: str) -> str:
    """Return a prompt as a user's message in the model's chat template, if it has one.

    A start token that the tokenizer adds by itself is left out, so that there is exactly one.
    """
    if not getattr(tokenizer, "chat_template", None):
        return text
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    bos = tokenizer.bos_token_id
    adds_it = bos is not None and list(tokenizer("").input_ids[:1]) == [bos]
    return text.removeprefix(tokenizer.bos_token).lstrip(" ") if adds_it else text


def chat_prompt(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a prompt as a user's message, with at most one start token."""
    return plain_prompt(tokenizer, chat_text(tokenizer, text))


def plain_prompt(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text to be continued, with at most one start token."""
    ids = list(tokenizer(text).input_ids)
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    if len(ids) > 1 and ids[-1] == eos and not text.endswith(tokenizer.eos_token or "\0"):
        ids = ids[:-1]  # some tokenizers close every text
    while len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
        ids = ids[1:]  # the text began with it already
    return ids


def _check(
    model: HeadModel,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    ablation: Ablation,
    max_new_tokens: int,
    stop: Sequence[str],
) -> list[list[int]]:
    check_count("max_new_tokens", max_new_tokens)
    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
        raise InputError(f"stop is {stop!r}: give a list of strings, none of them empty")
    if ablation.values is not None and any(values.ndim != 1 for values in ablation.values):
        raise InputError("values per item cannot go on into new text: use zero or mean ablation")
    if isinstance(prompts, str) or not len(prompts):
        raise InputError("give a list of one or more prompts")
    prompts = [plain_prompt(model.tokenizer, p) if isinstance(p, str) else p for p in prompts]
    vocabulary = model.hf.get_input_embeddings().weight.shape[0]
    bos, checked = model.tokenizer.bos_token_id, []
    for i, prompt in enumerate(prompts):
        ids = [int(token) for token in prompt]
        if not ids:
            raise InputError(f"prompt {i} is empty: give it one token or more")
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise InputError(f"prompt {i} holds ids outside 0 … {vocabulary - 1}: other tokenizer?")
        if bos is not None and ids[:2] == [bos, bos]:
            raise InputError(f"prompt {i} begins with the start token twice: see chat_prompt")
        if model.max_length and len(ids) + max_new_tokens > model.max_length:
            raise InputError(
                f"prompt {i} has {len(ids)} tokens and {max_new_tokens} more may come, but the "
                f"model reads at most {model.max_length}: shorten the prompt or max_new_tokens"
            )
        checked.append(ids)
    return checked
