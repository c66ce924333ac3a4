"""Answers that a model writes: a worked solution, code that is run, a text that may swear.

Such an answer cannot be scored in one forward: each mask has to write every answer anew, which
costs a hundred times as much. So heads are *located* on what the intact model wrote itself, on the
items it solved: how probable do these very texts stay when heads are off? And they are *verified*
by writing: how many answers are still right?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from csloc_utils.ablation import Ablation
from csloc_utils.errors import GateError, InputError
from csloc_utils.gate import Gate
from csloc_utils.generation import chat_text, generate, plain_prompt
from csloc_utils.intervals import bootstrap
from csloc_utils.measurements import Measurements, Scorer
from csloc_utils.store import Store
from csloc_utils.tasks import Item, Task
from csloc_utils.tasks.answers import check
from csloc_utils.tasks.benchmarks import find_benchmark, load_with_rows

if TYPE_CHECKING:
    from csloc_utils.models import HeadModel

# Benchmarks whose published score needs a written answer, and the form whose prompts ask for it.
WRITTEN = {
    "gsm8k": "gsm8k:worked",
    "mbpp": "mbpp",
    "humaneval": "humaneval",
    "swearing": "swearing",
    "rhyming": "rhyming",
}
RUNS_CODE = ("mbpp", "humaneval")


@dataclass(frozen=True)
class Written:
    """A benchmark whose answers are written.

    Attributes
    ----------
    task : Task
        Prompts and halves.
    judge : callable
        Takes an item and a text, returns 1.0 for right and 0.0 for wrong.
    max_new_tokens : int
    stop : tuple of str
        Where an answer ends.
    items_differ : bool
        Whether an answer that is right for one item is wrong for another; not for swearing.
    """

    task: Task
    judge: Callable[[Item, str], float]
    max_new_tokens: int
    stop: tuple[str, ...]
    items_differ: bool = True


def load_written(
    name: str,
    data_dir: str | Path | None = None,
    seed: int = 0,
    shots: int | None = None,
    *,
    max_new_tokens: int | None = None,
    allow_code_execution: bool = False,
) -> Written:
    """Load a benchmark to be judged by what a model writes.

    Parameters
    ----------
    name : str
        A key of `WRITTEN`.
    data_dir, seed, shots
        See `csloc_utils.tasks.load_benchmark`.
    max_new_tokens : int, optional
        Longest answer; by default the benchmark's.
    allow_code_execution : bool
        Answers to MBPP and HumanEval are programs. They are run, in a sandbox, only with this.

    Raises
    ------
    InputError
        If the benchmark is not judged by writing, or would run code without leave or sandbox.
    """
    if name not in WRITTEN:
        raise InputError(f"{name!r} has no written answers: choose from {', '.join(WRITTEN)}")
    run = None
    if name in RUNS_CODE:
        if not allow_code_execution:
            raise InputError(
                f"the answers to {name} are programs, and judging one is running it: allow it with "
                "--allow-code-execution (it is shut in a sandbox), or choose another task"
            )
        from csloc_utils import sandbox

        sandbox.require()
        run = _passes
    full = WRITTEN[name]
    task, rows = load_with_rows(full, data_dir, seed, shots)
    bench = find_benchmark(full)
    return Written(
        replace(task, name=name),
        partial(_judge, name, rows, run),
        max_new_tokens or bench.max_new_tokens,
        bench.stop,
        name != "swearing",
    )


def _judge(
    name: str, rows: dict, run: Callable[[str], bool] | None, item: Item, text: str
) -> float:
    return check(name, rows[item.prompt], text, run)


def _passes(program: str) -> bool:
    from csloc_utils.sandbox import run_python

    return run_python(program).passed


class WritingEvaluator(Scorer):
    """Scores masks by the answers that are written under them: one score, ``accuracy``.

    Parameters
    ----------
    model : HeadModel
    written : Written
    split : {"locate", "verify", "all"}
    n_items : int, optional
        A seeded random sample of that many.
    ablation : {"zero"}
        Other kinds have no meaning for text that is yet to be written.
    store : Store or path, optional
        Where scores are kept, mask by mask.
    chat : bool
        Ask as a user of a chat, through the model's template.
    items : sequence of Item, optional
        These items instead.
    progress : bool, optional

    Attributes
    ----------
    grid, scores, items, facts, task, split, evaluations, baseline
        As of an `csloc_utils.measure.Evaluator`.
    """

    def __init__(
        self,
        model: HeadModel,
        written: Written,
        split: str = "verify",
        n_items: int | None = None,
        *,
        ablation: str = "zero",
        store: Store | str | Path | None = None,
        chat: bool = False,
        items: Sequence[Item] | None = None,
        progress: bool | None = None,
    ) -> None:
        if ablation != "zero":
            raise InputError(f"written answers know zero ablation only, not {ablation!r}")
        self.model, self.written, self.split, self.ablation = model, written, split, ablation
        self.task, self.grid, self.progress = written.task, model.grid, progress
        self.items = self.task.items(split, n_items) if items is None else tuple(items)
        self.facts = np.array([item.fact or item.prompt for item in self.items])
        self.scores = ("accuracy",)
        super().__init__()
        self.chat = chat
        self.prompts = [plain_prompt(model.tokenizer, self.asked(item)) for item in self.items]
        self.chunk = 1
        self.store = store if isinstance(store, Store) else Store(store)
        self._context = self.store.context(
            {
                "model": model.fingerprint,
                "written": self.task.fingerprint(self.items),
                "task": self.task.name,
                "chat": chat,
                "max_new_tokens": written.max_new_tokens,
                "stop": written.stop,
            },
            self.scores,
        )

    def asked(self, item: Item) -> str:
        """The text that the model continues: prefix and prompt, in a chat the user's message."""
        context = self.task.context(item)
        return chat_text(self.model.tokenizer, context) if self.chat else context

    def texts(self, masks: np.ndarray) -> list[list[str]]:
        """Write every answer under every mask: nested lists ``[mask][item]``; nothing is kept."""
        return generate(
            self.model,
            self.prompts,
            self.grid.check_masks(masks),
            ablation=Ablation(),
            max_new_tokens=self.written.max_new_tokens,
            stop=self.written.stop,
            progress=self.progress,
        ).texts

    def judge(self, texts: Sequence[str]) -> np.ndarray:
        """Say of each item's text whether it is right, ``(n_items,)``."""
        return np.array([self.written.judge(i, t) for i, t in zip(self.items, texts)], float)

    def measure(self, masks: np.ndarray, count: bool = True) -> Measurements:
        """Score masks; what the store already holds is not written again."""
        masks = self.grid.check_masks(masks)
        if count:
            self._count(len(masks))
        intact = np.zeros(self.grid.size, bool)
        wanted = {mask.tobytes(): mask for mask in [intact, *masks]}
        known = {key: self._known(mask) for key, mask in wanted.items()}
        missing = [mask for key, mask in wanted.items() if known[key] is None]
        for part in np.array_split(missing, max(1, len(missing) // _MASKS)) if missing else ():
            scores = np.array([self.judge(texts) for texts in self.texts(part)])
            self.store.put(self._context, self.chunk, part, scores[:, None])
            known |= {mask.tobytes(): row for mask, row in zip(part, scores)}
        right = np.stack([known[mask.tobytes()] for mask in masks])
        unchanged = np.repeat(known[intact.tobytes()][None], len(masks), axis=0)
        return Measurements(
            self.grid,
            masks,
            {"accuracy": right},
            {"accuracy": unchanged},
            self.facts,
            self.provenance,
        )

    def _known(self, mask: np.ndarray) -> np.ndarray | None:
        found = self.store.get(self._context, mask, 1)
        return found[self.chunk][0] if found else None

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the numbers come from, JSON-ready."""
        items = self.task.fingerprint(self.items)
        return self._about(items, max_new_tokens=self.written.max_new_tokens)


# Masks whose answers are written together before they are kept: enough to fill the memory.
_MASKS = 8


@dataclass(frozen=True)
class OwnAnswers:
    """What the intact model wrote, and what of it is right.

    Attributes
    ----------
    task : Task
        The items that were solved, answered by the model's own texts; scoring "text".
    accuracy : dict of str to float
        Share of right answers among the ``locate`` and the ``verify`` items that were asked.
    gate : Gate
        Of the locate items. Both of its intervals are those of the share of right answers minus
        the share of texts that would be right for another item; where items do not differ in what
        is right, of the share itself.
    """

    task: Task
    accuracy: dict[str, float]
    gate: Gate


def own_answers(
    locate: WritingEvaluator, verify: WritingEvaluator, confidence: float = 0.95, seed: int = 0
) -> OwnAnswers:
    """Let the intact model write, and make a task of the items that it solves.

    Raises
    ------
    GateError
        If too little is solved to speak of a capability.
    """
    halves, accuracy, above = {}, {}, None
    written = locate.written
    for split, evaluator in (("locate", locate), ("verify", verify)):
        (texts,) = evaluator.texts(np.zeros((1, evaluator.grid.size), bool))
        right = evaluator.judge(texts)
        accuracy[split] = float(right.mean())
        halves[split] = tuple(
            replace(item, prompt=evaluator.asked(item), answers=(text,))
            for item, text, good in zip(evaluator.items, texts, right)
            if good and text.strip()
        )
        if split == "locate":
            beyond = right - (_permuted(evaluator, texts) if written.items_differ else 0)
            above = bootstrap([(beyond, evaluator.facts)], confidence=confidence, seed=seed)
    if above.low <= 0 or not halves["locate"] or not halves["verify"]:
        raise GateError(
            f"the model does not show this capability: it solves {accuracy['locate']:.0%} of "
            f"{len(locate.items)} items of {locate.task.name} and {accuracy['verify']:.0%} of "
            f"{len(verify.items)} others (above other items' answers by {above}); nothing is "
            "claimed about its heads"
        )
    gate = Gate(locate.task.name, accuracy["locate"], 0.0, above, above, len(locate.items))
    task = replace(
        locate.task,
        name=f"{locate.task.name}, own answers",
        scoring="text",
        prefix="",  # the items hold it
        delimiter="" if locate.chat else locate.task.delimiter,
        locate=halves["locate"],
        verify=halves["verify"],
    )
    return OwnAnswers(task, accuracy, gate)


def _permuted(evaluator: WritingEvaluator, texts: Sequence[str]) -> np.ndarray:
    """Judge each text as the answer to the next item of another fact."""
    n = len(texts)
    moved = [
        next(
            (j for j in np.roll(np.arange(n), -i - 1) if evaluator.facts[j] != evaluator.facts[i]),
            i,
        )
        for i in range(n)
    ]
    return np.array(
        [evaluator.written.judge(evaluator.items[j], texts[i]) for i, j in enumerate(moved)]
    )
