"""What breaks when heads are off: answers only, or language itself.

Two things are read. A *text* that the model goes on with: how varied it is, how much of it is one
passage repeated, how sure the model is of each next word. And *answers*: right, wrong but of the
form of an answer, or not even that. Everything is written greedily, so the same heads give the same
words again.

The measures take any sequence (words, characters, token ids) and depend only on which of its parts
are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from csloc_utils.ablation import masked_logits
from csloc_utils.designs import check_count, check_heads
from csloc_utils.errors import InputError
from csloc_utils.generation import generate, plain_prompt
from csloc_utils.intervals import bootstrap
from csloc_utils.tasks import Item, Task
from csloc_utils.universal import same_grid

if TYPE_CHECKING:
    from csloc_utils.heads import Head
    from csloc_utils.measurements import Scorer
    from csloc_utils.models import HeadModel

VERDICTS = ("right", "wrong", "degenerate")
# Of a head's damage under zero ablation, what must be left under another kind to call it content.
_HALF = 0.5
# Texts in one forward that keeps the logits of every position.
_ROWS = 8


def distinct(tokens: Sequence[Hashable], n: int) -> float:
    """Share of different n-grams among all n-grams (distinct-n of Li et al. 2016).

    1 = nothing is said twice. NaN for a text shorter than n, which has none.
    """
    check_count("n", n)
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def longest_repeat(tokens: Sequence[Hashable]) -> float:
    """Share of the text in its longest passage that says one thing over and over.

    Such a passage is some n-gram, of any n, twice or more without anything between, a last
    incomplete copy included: ``a b c a b c a`` is one of n = 3. 0 where no n-gram follows itself at
    once, 1 where the whole text is one such run, NaN for an empty text.
    """
    n, best = len(tokens), 0
    for period in range(1, n // 2 + 1):
        run = 0  # how long each part equals the one a period later
        for i in range(n - period):
            run = run + 1 if tokens[i] == tokens[i + period] else 0
            if run >= period:
                best = max(best, run + period)
    return best / n if n else float("nan")


def next_token_entropy(
    model: HeadModel, texts: Sequence[Sequence[int]], starts: Sequence[int], mask: np.ndarray
) -> list[np.ndarray]:
    """Entropy of the next-token distribution along texts, under a mask.

    Parameters
    ----------
    model : HeadModel
    texts : sequence of sequences of int
        Token ids, prompt included.
    starts : sequence of int
        Where each text's own part begins, at least 1: the first token that is asked about.
    mask : bool array (n_heads,)
        True = ablated.

    Returns
    -------
    list of float arrays
        In nats, one number a token from `starts` on; from 0 (sure) to the logarithm of the
        vocabulary's size.
    """
    (mask,) = model.grid.check_masks(np.atleast_2d(mask))
    if any(not 1 <= start <= len(text) for text, start in zip(texts, starts, strict=True)):
        raise InputError("a text's own part must begin behind its first token and within the text")
    entropies = []
    for begin in range(0, len(texts), _ROWS):
        part, own = texts[begin : begin + _ROWS], starts[begin : begin + _ROWS]
        longest = max(map(len, part))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in part])
        lengths = torch.tensor([len(text) for text in part])
        attention = (torch.arange(longest) < lengths[:, None]).long()
        counts = [len(text) - start for text, start in zip(part, own)]
        steps = torch.arange(max(1, *counts) if counts else 1)
        places = (torch.tensor(own)[:, None] - 1 + steps).clamp(max=longest - 1)
        masks = np.tile(mask, (len(part), 1))
        logits = masked_logits(model, ids, attention, masks, positions=places).float()
        logs = logits.log_softmax(-1)
        values = -(logs.exp() * logs).sum(-1).cpu().numpy()
        entropies += [row[:count] for row, count in zip(values, counts)]
    return entropies


def texts_under(
    model: HeadModel, prompts: Sequence[str], masks: np.ndarray, max_new_tokens: int = 60
) -> pd.DataFrame:
    """Let the model go on with every prompt under every mask, and measure what it writes.

    Parameters
    ----------
    model : HeadModel
    prompts : sequence of str
        Beginnings of plain text.
    masks : bool array (n_masks, n_heads)
        True = ablated.
    max_new_tokens : int, default 60

    Returns
    -------
    DataFrame
        A row a mask and prompt: ``mask`` and ``prompt`` (their numbers), ``text``, ``n_tokens``
        (without the end-of-text token), ``distinct_1``, ``distinct_2``, ``distinct_3``, ``repeat``
        (see `longest_repeat`), all over tokens, and ``entropy`` (mean along the text, nats). A text
        that ends at once has NaN.
    """
    masks = model.grid.check_masks(masks)
    written = generate(model, prompts, masks, max_new_tokens=max_new_tokens, progress=False)
    begun, rows = [plain_prompt(model.tokenizer, prompt) for prompt in prompts], []
    for m, mask in enumerate(masks):
        own = [
            ids[:-1] if ending == "eos" else ids
            for ids, ending in zip(written.ids[m], written.endings[m])
        ]
        whole = [[*prompt, *ids] for prompt, ids in zip(begun, own)]
        entropies = next_token_entropy(model, whole, [len(prompt) for prompt in begun], mask)
        for p, (ids, entropy) in enumerate(zip(own, entropies)):
            rows.append(
                {
                    "mask": m,
                    "prompt": p,
                    "text": written.texts[m][p],
                    "n_tokens": len(ids),
                    **{f"distinct_{n}": distinct(ids, n) for n in (1, 2, 3)},
                    "repeat": longest_repeat(ids),
                    "entropy": float(entropy.mean()) if len(entropy) else float("nan"),
                }
            )
    return pd.DataFrame(rows)


def shape(text: str) -> str:
    """Form of an answer: digits become 9, words a, capitalized ones A, all other signs stay.

    Examples
    --------
    >>> shape("42"), shape("Addis Ababa"), shape("house"), shape("12 + 3")
    ('9', 'A A', 'a', '9 + 9')
    """
    out: list[str] = []
    for i, sign in enumerate(text):
        kind = "9" if sign.isdigit() else "a" if sign.isalpha() else sign
        before = text[i - 1] if i else ""
        if kind == "9" and before.isdigit():
            continue
        if kind == "a" and before.isalpha():
            continue
        out.append("A" if kind == "a" and sign.isupper() else kind)
    return "".join(out)


def judge_answer(text: str, right: Sequence[str], others: Sequence[str]) -> str:
    """Call a written answer right, wrong (but of the form of an answer), or degenerate.

    The rule: only the first line counts, up to the first sign that ends a phrase (``. , ; : ! ?``),
    without white space around it. It is *right* when it is one of the right answers. It is *wrong*
    when it has the `shape` of one of the answers to other items and is no longer than the longest
    of them. Everything else is *degenerate*.

    Parameters
    ----------
    text : str
        What was written behind the prompt.
    right : sequence of str
        Right answers.
    others : sequence of str
        Answers to other items of the task; they say what an answer looks like.
    """
    answer = _answer(text)
    if answer and answer in [_answer(r) for r in right]:
        return "right"
    shapes, longest = {shape(o.strip()) for o in others}, max(map(len, others), default=0)
    return "wrong" if shape(answer) in shapes and len(answer) <= longest else "degenerate"


def answers_under(
    model: HeadModel, task: Task, items: Sequence[Item], masks: np.ndarray
) -> pd.DataFrame:
    """Let the model write its answers under every mask, and judge them.

    Parameters
    ----------
    model : HeadModel
    task : Task
        Its answers should be numbers or words. What an answer looks like is read from its *locate*
        items.
    items : sequence of Item
        Items that are asked, usually some of ``task.verify``.
    masks : bool array (n_masks, n_heads)
        True = ablated.

    Returns
    -------
    DataFrame
        A row a mask and item: ``mask`` and ``item`` (their numbers), ``fact``, ``text`` (the first
        line), ``verdict`` (one of `VERDICTS`, see `judge_answer`).

    Raises
    ------
    InputError
        For a task that is scored as running text: it has no answers.
    """
    if task.scoring == "text":
        raise InputError(f"{task.name} is running text and has no answers: see texts_under")
    masks = model.grid.check_masks(masks)
    forms = [answer for item in task.locate for answer in item.right]
    tokens = max(len(model.tokenizer(task.delimiter + form).input_ids) for form in forms)
    prompts = [task.context(item) for item in items]
    written = generate(
        model, prompts, masks, max_new_tokens=tokens + 3, stop=("\n",), progress=False
    )
    rows = [
        (m, i, item.fact, text, judge_answer(text, item.right, forms))
        for m, texts in enumerate(written.texts)
        for i, (item, text) in enumerate(zip(items, texts))
    ]
    return pd.DataFrame(rows, columns=["mask", "item", "fact", "text", "verdict"])


def kinds_of_loss(
    judges: Mapping[str, Mapping[str, Scorer]],
    sets: Mapping[str, Sequence[Head]],
    score: str = "logprob",
    confidence: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Replace heads in several ways, and ask how much of the zero-ablation damage is left.

    Parameters
    ----------
    judges : mapping of kind to mapping of task to Evaluator
        ``zero`` and others, such as ``mean`` and ``resample``, on the same items.
    sets : mapping of str to sequence of Head
        Heads that are replaced together.
    score, confidence, n_boot, seed
        Of the effect, and of the bootstrap over facts.

    Returns
    -------
    DataFrame
        A row a set, task and kind: ``set``, ``task``, ``kind``, ``drop``, ``low``, ``high``;
        ``left``, ``left_low`` and ``left_high``, the share of the drop under zero ablation (items
        are paired; NaN where that drop is not clearly above 0); and ``verdict``: ``content`` where
        more than half is left for sure, ``constant`` where less than half is, else ``unclear``;
        ``no damage`` where zero ablation does none for sure.

    Raises
    ------
    InputError
        Without zero ablation, or where kinds differ in tasks or items.
    """
    if "zero" not in judges:
        raise InputError("there is no zero ablation to compare with: give one evaluator of it")
    zero = judges["zero"]
    grid = same_grid(zero)
    masks = np.array([grid.mask(check_heads(grid, heads)) for heads in sets.values()])
    for kind, by_task in judges.items():
        same = list(by_task) == list(zero) and all(
            np.array_equal(by_task[task].facts, zero[task].facts) for task in zero
        )
        if not same:
            raise InputError(f"{kind} ablation has other tasks or items than zero ablation")
    options, rows = {"n_boot": n_boot, "confidence": confidence, "seed": seed}, []
    for task, judge in zero.items():
        facts = np.asarray(judge.facts)
        drops = {
            kind: -by_task[task].measure(masks, count=False).item_effects(score)
            for kind, by_task in judges.items()
        }
        for place, name in enumerate(sets):
            base = bootstrap([(drops["zero"][place], facts)], **options)
            for kind, values in drops.items():
                made = bootstrap([(values[place], facts)], **options)
                share, verdict = (np.nan,) * 3, "no damage"
                if base.low > 0:
                    pair = [(values[place], facts), (drops["zero"][place], facts)]
                    left = bootstrap(pair, np.divide, paired=True, **options)
                    share = (left.value, left.low, left.high)
                    verdict = "unclear"
                    if left.low > _HALF:
                        verdict = "content"
                    elif left.high < _HALF:
                        verdict = "constant"
                rows.append((name, task, kind, made.value, made.low, made.high, *share, verdict))
    names = "set task kind drop low high left left_low left_high verdict"
    return pd.DataFrame(rows, columns=names.split())


def _answer(text: str) -> str:
    lines = text.strip().splitlines()
    line = lines[0] if lines else ""
    ends = [place for sign in ".,;:!?" if (place := line.find(sign)) >= 0]
    return line[: min(ends, default=len(line))].strip()
