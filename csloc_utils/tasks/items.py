"""What a task is: items, and the rule that keeps what is learnt apart from what is checked.

Heads are located on one half of a task's items and verified on the other. That only means
something if nothing is known twice: 7 × 8 and 8 × 7 are one *fact*, so are two sentences of one
passage. Items therefore carry the fact they ask for, and a `Task` refuses to be built when a fact
stands in both halves, or when its few-shot prefix gives an item away.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from csloc_utils.errors import InputError

SCORINGS = ("continuation", "choice", "text")
SPLITS = ("locate", "verify", "all")


@dataclass(frozen=True)
class Item:
    """One question with its answer.

    Parameters
    ----------
    prompt : str
        Text the model reads, behind the task's few-shot prefix.
    answers : tuple of str
        Accepted answers, for the scorings "continuation" and "text".
    choices : tuple of str
        All choices, for the scoring "choice"; then `answers` stays empty.
    correct : int
        Index of the right choice.
    fact : str
        What the item is about. Items with one fact never straddle a split, and intervals resample
        facts, not items. Empty: the prompt itself.
    where : str
        Where the item was read ("file:line"), for messages; no part of its identity.

    Raises
    ------
    InputError
        If the item cannot be scored: no answer, an empty one, two that are the same.
    """

    prompt: str
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    correct: int = -1
    fact: str = ""
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("prompt", "fact"):
            _check_text(name, getattr(self, name))
        for name in ("answers", "choices"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if self.answers and self.choices:
            raise InputError("an item has either answers or choices, not both: drop one of them")
        if not self.answers and not self.choices:
            raise InputError("the item has no answer: give at least one")
        if self.choices:
            if len(self.choices) < 2:
                raise InputError("one choice is no choice: give at least two")
            if type(self.correct) is not int or not 0 <= self.correct < len(self.choices):
                raise InputError(
                    f"the right choice {self.correct!r} is not an index of the"
                    f" {len(self.choices)} choices: give 0 to {len(self.choices) - 1}"
                )
        object.__setattr__(self, "fact", self.fact or self.prompt)

    @property
    def right(self) -> tuple[str, ...]:
        """The answers that count as right: the accepted ones, or the right choice."""
        return (self.choices[self.correct],) if self.choices else self.answers


@dataclass(frozen=True)
class Task:
    """A capability as items to score, in two halves that share no fact.

    Parameters
    ----------
    name, capability : str
        Short name, and what the model can do if it does well here.
    scoring : {"continuation", "choice", "text"}
        How items are scored: against accepted answers, among choices, or as running text.
    prefix : str
        Few-shot text in front of every prompt; may be empty. No item of either half is in it.
    locate, verify : tuple of Item
        Items to find heads on, and items to check them on.
    seed : int
        The seed of the split and of every sample of items.
    description, source : str
        A sentence for readers, and "built-in" or the file the task came from.
    delimiter : str
        What joins a prompt and its answer, unless white space is there already.

    Raises
    ------
    InputError
        If a half is empty, a fact is in both halves, the prefix holds an item, or an item does not
        fit the scoring.
    """

    name: str
    capability: str
    scoring: str
    prefix: str
    locate: tuple[Item, ...]
    verify: tuple[Item, ...]
    seed: int
    description: str = ""
    source: str = "built-in"
    delimiter: str = " "

    def __post_init__(self) -> None:
        for name in ("name", "capability", "prefix", "description", "source", "delimiter"):
            _check_text(name, getattr(self, name))
        if not self.name.strip():
            raise InputError("the task has no name: give it one")
        if type(self.seed) is not int:
            raise InputError(f"the seed must be a whole number, not {self.seed!r}")
        if self.scoring not in SCORINGS:
            raise InputError(f"unknown scoring {self.scoring!r}: use {', '.join(SCORINGS)}")
        for split in ("locate", "verify"):
            object.__setattr__(self, split, tuple(getattr(self, split)))
            if not getattr(self, split):
                raise InputError(f"task {self.name!r} has no {split} items: give at least one")
        for item in self.locate + self.verify:
            self._check_item(item)
        self._check_disjoint()

    def _check_item(self, item: Item) -> None:
        if not isinstance(item, Item):
            raise InputError(f"a task is made of Item objects, not {type(item).__name__}")
        if bool(item.choices) != (self.scoring == "choice"):
            need = "choices" if self.scoring == "choice" else "answers"
            raise InputError(f"{self.scoring} scoring needs {need}: {item.prompt!r} has none")
        if self.scoring == "text" and len(item.answers) > 1:
            raise InputError(
                f"text scoring follows one continuation, {item.prompt!r} has {len(item.answers)}:"
                " keep one, or make two items of them"
            )
        if not self.context(item).strip():
            raise InputError("an item without prompt needs a task with a prefix: give one of them")
        for answer in item.right if item.prompt.strip() else ():
            shown = join(item.prompt, answer, self.delimiter).strip()
            # Whole words: "12 + 2 = 14" does not give "2 + 2 = 4" away.
            if shown in self.prefix and re.search(rf"(?<!\w){re.escape(shown)}(?!\w)", self.prefix):
                raise InputError(
                    f"the prefix already answers the item {item.prompt!r}: take it out of one"
                )

    def _check_disjoint(self) -> None:
        for what in ("fact", "prompt"):
            both = {getattr(i, what) for i in self.locate} & {getattr(i, what) for i in self.verify}
            if self.scoring == "choice" and what == "prompt":
                continue  # "Which of these is a metal?" may be asked twice, with other choices
            if both:
                raise InputError(
                    f"the {what} {min(both)!r} is in locate and in verify: keep it in one of them"
                )

    def items(self, split: str, n: int | None = None) -> tuple[Item, ...]:
        """Items of one half, or of both.

        Parameters
        ----------
        split : {"locate", "verify", "all"}
        n : int, optional
            Take a random sample of this size, drawn with the task's seed (the first `n` lines of a
            file are often its easiest, or all of one kind). A larger sample holds the smaller
            ones. Default: all items.

        Returns
        -------
        tuple of Item, in the order of the task

        Raises
        ------
        InputError
            If there is no such half or it has fewer than `n` items.
        """
        if split not in SPLITS:
            raise InputError(f"unknown split {split!r}: use {', '.join(SPLITS)}")
        items = self.locate + self.verify if split == "all" else getattr(self, split)
        if n is None:
            return items
        if type(n) is not int or not 1 <= n <= len(items):
            where = "" if split == "all" else f"{split} "
            raise InputError(
                f"cannot take {n!r} of the {len(items)} {where}items of task {self.name!r}:"
                f" ask for 1 to {len(items)}"
            )
        order = shuffled(range(len(items)), f"items/{self.seed}/{split}")
        return tuple(items[i] for i in sorted(order[:n]))

    def context(self, item: Item) -> str:
        """The text before the answer: prefix and prompt."""
        return self.prefix + item.prompt

    def join(self, item: Item, answer: str) -> str:
        """The whole text of one sequence: prefix, prompt, delimiter, answer."""
        return self.prefix + join(item.prompt, answer, self.delimiter)

    @property
    def chance(self) -> float:
        """Accuracy of blind guessing: the mean of 1 / choices, or 0 without choices."""
        if self.scoring != "choice":
            return 0.0
        items = self.locate + self.verify
        return sum(1 / len(item.choices) for item in items) / len(items)

    def fingerprint(self, items: Iterable[Item]) -> str:
        """Name of what is measured: a sha256 over the scoring, the prefix and `items`, in hex.

        Two runs whose fingerprints agree show the model the same texts. The name of the task, its
        seed and its facts play no part in that.
        """
        rows = [[i.prompt, list(i.answers), list(i.choices), i.correct] for i in items]
        text = json.dumps([self.scoring, self.prefix, self.delimiter, rows], ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


def join(prompt: str, answer: str, delimiter: str = " ") -> str:
    """Put an answer behind its prompt, with the delimiter unless white space is there already."""
    bare = not prompt or prompt[-1].isspace() or answer[:1].isspace()
    return prompt + ("" if bare else delimiter) + answer


def shuffled(values: Iterable, seed: str) -> list:
    """`values` in a random order that depends on `seed` alone, on any machine and version."""
    values = list(values)
    random.Random(seed).shuffle(values)
    return values


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name!r} must be text, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name!r} holds half a character (a lone surrogate): retype it") from None


def _texts(name: str, values: Sequence[str]) -> tuple[str, ...]:
    """Check a list of answers: texts, none empty, no two the same but for white space."""
    if isinstance(values, str) or not isinstance(values, (list, tuple)):
        raise InputError(f"{name!r} must be a list of texts, not {values!r}")
    seen: set[str] = set()
    for value in values:
        _check_text(name, value)
        bare = value.strip()
        if not bare:
            raise InputError(f"an empty text stands in {name!r}: fill it in or take it out")
        if bare in seen:
            raise InputError(f"{bare!r} stands twice in {name!r}: keep one")
        seen.add(bare)
    return tuple(values)
