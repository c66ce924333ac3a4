"""From items to tokens, and from logits to scores.

Answers are known, so they are *forced*: the text with its answer is tokenized as one, and a single
forward gives both the answer's log-probability and whether greedy decoding would have written it.
`encode` lays items out as rows of tokens and *probes*, each probe asking one row for one token's
log-probability at one position. Answers that share their context (the letters of a multiple-choice
question, say) share a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from csloc_utils.errors import InputError

if TYPE_CHECKING:
    from csloc_utils.tasks import Item, Task

SCORES = {
    "continuation": ("logprob", "accuracy", "margin"),
    "choice": ("logprob", "accuracy", "margin", "logprob_norm", "accuracy_norm"),
    "text": ("logprob", "accuracy", "margin"),
}


@dataclass(frozen=True)
class Encoded:
    """Items of a task as rows of tokens and probes.

    Attributes
    ----------
    rows : list of list of int
        Token ids to run, each text with an answer but for its last token.
    prefix : int
        How many leading tokens all rows share; the model reads these once for all items.
    positions : int array (n_rows, n_slots)
        Where each row is scored; short rows repeat their last position.
    probes : int array (n_probes, 3)
        Row, slot (a column of `positions`) and token id of every probe.
    answer_starts, item_starts : int arrays
        First probe of every answer; first answer of every item.
    correct : int array (n_items,)
        Index of the right choice among an item's answers (choice scoring).
    answer_bytes : int array (n_answers,)
        Length of the answers' text in UTF-8.
    """

    scoring: str
    rows: list[list[int]]
    prefix: int
    positions: np.ndarray
    probes: np.ndarray
    answer_starts: np.ndarray
    item_starts: np.ndarray
    item_rows: np.ndarray
    correct: np.ndarray
    answer_bytes: np.ndarray

    @property
    def n_items(self) -> int:
        """Number of items."""
        return len(self.item_starts)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of everything that is run and scored (sha256)."""
        parts = [self.scoring, self.rows, *(getattr(self, a).tolist() for a in _ARRAYS)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def suffixes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what follows the shared prefix, right-padded, and the mask of whole rows.

        Padding is token 0: every vocabulary has it, and the mask keeps it from being read.

        Returns
        -------
        ids : LongTensor (n_rows, longest - prefix)
        attention_mask : LongTensor (n_rows, longest)
        """
        longest = max(map(len, self.rows))
        ids = torch.full((len(self.rows), longest - self.prefix), 0)
        attention = torch.zeros(len(self.rows), longest, dtype=torch.long)
        for i, row in enumerate(self.rows):
            ids[i, : len(row) - self.prefix] = torch.tensor(row[self.prefix :])
            attention[i, : len(row)] = 1
        return ids, attention


_ARRAYS = ("positions", "probes", "answer_starts", "item_starts", "correct", "answer_bytes")


def encode(
    task: Task, items: Sequence[Item], tokenizer: Any, max_length: int | None = None
) -> Encoded:
    """Tokenize items with their answers.

    The answer's tokens are those of the *joined* text after what it shares with the prompt's own
    tokens: ``"Answer:"`` and ``" A"`` are scored as ``"Answer: A"`` is written, also where the
    tokenizer merges across the border.

    Raises
    ------
    InputError
        Naming the item, if its answer adds no token, if two choices become the same tokens, if
        nothing precedes the answer, or if the text is longer than the model's context.
    """
    rows: list[list[int]] = []
    spots: list[list[int]] = []  # scored positions of each row
    probes: list[tuple[int, int, int]] = []
    answer_starts, item_starts, item_rows, sizes = [], [], [], []
    for item in items:
        candidates = item.choices or item.answers
        context = _tokens(tokenizer, task.context(item))
        forced = [_tokens(tokenizer, task.join(item, answer)) for answer in candidates]
        spans = [(ids, _shared(context, ids)) for ids in forced]
        _check_spans(item, candidates, spans, max_length)
        kept = list(zip(candidates, spans, strict=True))
        if not item.choices:  # "night" is counted under "nigh": drop what another answer begins
            kept = [
                (text, (ids, start))
                for text, (ids, start) in kept
                if not any(len(o) < len(ids) and ids[: len(o)] == o for o, _ in spans)
            ]
        item_starts.append(len(answer_starts))
        item_rows.append(len(rows))
        contexts = _maximal([ids[:-1] for _, (ids, _) in kept])
        for text, (ids, start) in kept:
            row = next(i for i, c in enumerate(contexts) if c[: len(ids) - 1] == ids[:-1])
            answer_starts.append(len(probes))
            sizes.append(len(text.strip().encode()))
            probes += [(len(rows) + row, place - 1, ids[place]) for place in range(start, len(ids))]
        rows += contexts
    spots = [sorted({p for r, p, _ in probes if r == row}) for row in range(len(rows))]
    width = max(map(len, spots))
    return Encoded(
        scoring=task.scoring,
        rows=rows,
        prefix=min(_shared_by_all(rows), min(s[0] for s in spots)),
        positions=np.array([s + s[-1:] * (width - len(s)) for s in spots]),
        probes=np.array([(row, spots[row].index(place), token) for row, place, token in probes]),
        answer_starts=np.array(answer_starts),
        item_starts=np.array(item_starts),
        item_rows=np.array(item_rows),
        correct=np.array([item.correct for item in items]),
        answer_bytes=np.array(sizes),
    )


def probe_logits(encoded: Encoded, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Read every probe from the logits of one or more masks.

    Parameters
    ----------
    logits : torch.Tensor, shape (n_masks * n_rows, n_slots, vocabulary)
        Masks outermost, at `encoded.positions`.

    Returns
    -------
    logprob, margin : arrays (n_masks, n_probes)
        Log-probability of the probe's token; its logit minus that of its best rival, positive when
        greedy decoding writes it.

    Raises
    ------
    InputError
        If a log-probability is not finite.
    """
    n_rows = len(encoded.rows)
    probes = torch.from_numpy(encoded.probes).to(logits.device)
    first = torch.arange(0, len(logits), n_rows, device=logits.device)[:, None]
    row, slot, token = first + probes[:, 0], probes[:, 1], probes[:, 2]
    # Slice by slice: a float32 copy of all logits at once may not fit.
    total = torch.stack([part.float().logsumexp(-1) for part in logits])
    logprob = logits[row, slot, token].float() - total[row, slot]
    if not torch.isfinite(logprob).all():
        remedy = "check the weights" if logits.dtype == torch.float32 else "try --dtype float32"
        raise InputError(
            f"the model returned log-probabilities that are not finite in {logits.dtype}: "
            f"nothing of this batch is kept; {remedy}"
        )
    best, places = logits.topk(2)
    ahead = places[..., 0][row, slot] == token
    rival = torch.where(ahead, best[..., 1][row, slot], best[..., 0][row, slot])
    margin = logits[row, slot, token].float() - rival.float()
    # Of tied tokens only one is written: a tie is no lead.
    margin = torch.where(ahead, margin.clamp(min=torch.finfo(torch.float32).tiny), margin)
    return logprob.double().cpu().numpy(), margin.double().cpu().numpy()


def combine(encoded: Encoded, logprob: np.ndarray, margin: np.ndarray) -> dict[str, np.ndarray]:
    """Turn probes into item scores.

    Parameters
    ----------
    logprob, margin : arrays (n_masks, n_probes)
        From `probe_logits`.

    Returns
    -------
    dict of str to array (n_masks, n_items)
        ``logprob`` (nats), ``accuracy`` (0 … 1) and ``margin`` (nats: how far the answer leads its
        best rival, still moving where the model is certain), by scoring rule:

        - *continuation*: log of the summed probability of the accepted answers; 1 if greedy
          decoding writes one of them; the smallest lead among the tokens of the best answer.
        - *choice*: log-probability of the right choice given that one of the choices is written;
          1 if the right choice is the most probable, a fair share of it in a tie; how much more
          log-probability it has than the best other. ``logprob_norm`` and ``accuracy_norm`` divide
          log-probabilities by the choice's length in bytes first.
        - *text*: mean over tokens of log-probability, of whether greedy decoding writes the token,
          and of its lead.
    """
    starts, items = encoded.answer_starts, encoded.item_starts
    total = np.add.reduceat(logprob, starts, axis=1)
    if encoded.scoring == "text":
        n_tokens = np.diff(np.append(starts, logprob.shape[1]))
        share, lead = (np.add.reduceat(v, starts, axis=1) / n_tokens for v in (margin > 0, margin))
        return {"logprob": total / n_tokens, "accuracy": share, "margin": lead}
    if encoded.scoring == "choice":
        plain = _choose(encoded, total)
        norm = _choose(encoded, total / encoded.answer_bytes)[:2]
        return dict(zip(SCORES["choice"], (*plain, *norm), strict=True))
    lead = np.maximum.reduceat(np.minimum.reduceat(margin, starts, axis=1), items, axis=1)
    return {
        "logprob": np.logaddexp.reduceat(total, items, axis=1),
        "accuracy": (lead > 0).astype(float),
        "margin": lead,
    }


def _choose(encoded: Encoded, score: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    right = encoded.item_starts + encoded.correct
    logprob = score[:, right] - np.logaddexp.reduceat(score, encoded.item_starts, axis=1)
    others = score.copy()
    others[:, right] = -np.inf
    margin = score[:, right] - np.maximum.reduceat(others, encoded.item_starts, axis=1)
    best = np.maximum.reduceat(score, encoded.item_starts, axis=1)
    # Choices that tie share the point, as a fair draw among them would.
    n_choices = np.diff(np.append(encoded.item_starts, score.shape[1]))
    tied = np.add.reduceat(score == np.repeat(best, n_choices, axis=1), encoded.item_starts, axis=1)
    return logprob, (score[:, right] == best) / tied, margin


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer(text).input_ids
    if (
        len(ids) > 1
        and ids[-1] == tokenizer.eos_token_id
        and not text.endswith(tokenizer.eos_token or "\0")
    ):
        ids = ids[:-1]  # some tokenizers close every text
    return ids


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two rows have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _shared_by_all(rows: Sequence[list[int]]) -> int:
    return min(_shared(rows[0], row) for row in rows)


def _maximal(contexts: list[list[int]]) -> list[list[int]]:
    """Drop contexts that another one begins with: the longer one's logits hold theirs."""
    unique = sorted(map(list, set(map(tuple, contexts))))
    return [c for c, after in zip(unique, [*unique[1:], []]) if after[: len(c)] != c]


def _check_spans(
    item: Item,
    candidates: Sequence[str],
    spans: list[tuple[list[int], int]],
    max_length: int | None,
) -> None:
    where = f"{item.where or repr(item.prompt)}: "
    for text, (ids, start) in zip(candidates, spans, strict=True):
        if start == len(ids):
            raise InputError(f"{where}answer {text!r} adds no token to the prompt: reword it")
        if start == 0:
            raise InputError(f"{where}nothing precedes the answer {text!r}: give a prompt")
        if max_length and len(ids) > max_length:
            raise InputError(
                f"{where}{len(ids)} tokens with prefix and answer, but the model reads at most "
                f"{max_length}: shorten the prompt or the prefix"
            )
    if item.choices and len({tuple(ids) for ids, _ in spans}) < len(spans):
        raise InputError(f"{where}two choices become the same tokens: reword one of them")
