"""Does the model show the capability at all? To be asked before any head is looked for.

Where intact performance is at chance, whatever a search finds is noise. The gate compares the
items' own answers with the answers of other items: the model must give its own more probability,
and write them more often, by more than the items' spread explains.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from csloc_utils.errors import GateError, InputError
from csloc_utils.intervals import Interval, bootstrap
from csloc_utils.measure import Evaluator
from csloc_utils.tasks import Item


@dataclass(frozen=True)
class Gate:
    """What `check_capability` found.

    Attributes
    ----------
    accuracy : float
        Mean accuracy of the intact model.
    chance : float
        Accuracy of blind guessing (0 where there are no choices).
    above_chance : Interval
        Accuracy minus chance; without choices, minus the accuracy at other items' answers.
    above_permuted : Interval
        Log-probability of the items' own answers minus that of other items' answers, in nats.
    n_items : int
        Items that could be compared.
    """

    task: str
    accuracy: float
    chance: float
    above_chance: Interval
    above_permuted: Interval
    n_items: int

    @property
    def passed(self) -> bool:
        """Whether both intervals lie above zero."""
        return self.above_chance.low > 0 and self.above_permuted.low > 0

    def require(self) -> Gate:
        """Return the gate, or raise `GateError` if the model does not show the capability."""
        if self.passed:
            return self
        found = f"accuracy is {self.accuracy:.2f} (above chance by {self.above_chance})"
        if self.above_permuted is not self.above_chance:
            found += (
                f" and its own answers lie {self.above_permuted} nats above other items' answers"
            )
        raise GateError(
            f"the model does not show this capability: on {self.n_items} items of {self.task} its "
            f"{found}; nothing is claimed about its heads"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything JSON-ready."""
        return asdict(self) | {"passed": self.passed}


def check_capability(
    evaluator: Evaluator, confidence: float = 0.95, n_boot: int = 2000, seed: int = 0
) -> Gate:
    """Compare the intact model on its items with the same items given other items' answers.

    Costs two forwards of the intact model, which are no evaluations of a mask and do not count.

    Parameters
    ----------
    evaluator : Evaluator
    confidence, n_boot, seed
        Level, resamples and seed of the bootstrap over facts.

    Raises
    ------
    InputError
        If there is one item, or all have the same answer, so that nothing could be compared.
    """
    if len(evaluator.items) < 2:
        raise InputError(
            f"one item of {evaluator.task.name} cannot show a capability: give two or more"
        )
    donors = _donors(evaluator)
    compared = np.flatnonzero(donors >= 0)
    if not len(compared):
        raise InputError(
            f"all items of {evaluator.task.name} have the same answer: knowing it is no "
            "capability; add items with other answers"
        )
    items = tuple(_answered(evaluator.items[i], evaluator.items[donors[i]]) for i in compared)
    # One mask at a time and nothing kept: a search's chunks are for its own baseline.
    own, other = (
        Evaluator(
            evaluator.model,
            evaluator.task,
            evaluator.split,
            items=these,
            store=":memory:",
            chunk=1,
            progress=False,
        ).baseline
        for these in (tuple(evaluator.items[i] for i in compared), items)
    )
    facts = evaluator.facts[compared]
    choices = [len(evaluator.items[i].choices) for i in compared]
    chance = np.array([1 / n if n else 0.0 for n in choices])
    guess = chance if evaluator.task.scoring == "choice" else other["accuracy"]
    settings = {"confidence": confidence, "n_boot": n_boot, "seed": seed}
    return Gate(
        evaluator.task.name,
        float(own["accuracy"].mean()),
        float(chance.mean()),
        bootstrap([(own["accuracy"] - guess, facts)], **settings),
        bootstrap([(own["logprob"] - other["logprob"], facts)], **settings),
        len(compared),
    )


def above_chance(evaluator: Any, chance: float, confidence: float = 0.95, seed: int = 0) -> Gate:
    """Compare intact accuracy with blind guessing alone, where answers cannot be exchanged.

    Both intervals of the gate are then the same one.
    """
    accuracy = evaluator.baseline["accuracy"]
    above = bootstrap([(accuracy - chance, evaluator.facts)], confidence=confidence, seed=seed)
    n_items = len(evaluator.facts)
    return Gate(evaluator.task.name, float(accuracy.mean()), chance, above, above, n_items)


def _donors(evaluator: Evaluator) -> np.ndarray:
    """Return for each item another one with different answers, by the best cyclic shift, or -1."""
    items, n = evaluator.items, len(evaluator.items)

    def differ(a: Item, b: Item) -> bool:
        if a.choices:
            return b.correct < len(a.choices) and a.correct != b.correct
        return set(a.answers).isdisjoint(b.answers)

    def fits(a: Item, b: Item) -> bool:
        return bool(a.choices) or evaluator.fits(_answered(a, b))  # choices stay the item's own

    def shifted(by: int) -> np.ndarray:
        return (np.arange(n) + by) % n

    pairs = {s: [differ(items[i], items[j]) for i, j in enumerate(shifted(s))] for s in range(1, n)}
    best = np.full(n, -1)
    # Whether a pair fits takes the tokenizer, so only shifts that could still win are asked.
    for shift in sorted(pairs, key=lambda s: -sum(pairs[s])):
        if sum(pairs[shift]) <= np.sum(best >= 0):
            break
        donors = np.array(
            [
                j if differs and fits(items[i], items[j]) else -1
                for i, (j, differs) in enumerate(zip(shifted(shift), pairs[shift], strict=True))
            ]
        )
        if np.sum(donors >= 0) > np.sum(best >= 0):
            best = donors
    return best


def _answered(item: Item, donor: Item) -> Item:
    if item.choices:
        return replace(item, correct=donor.correct)
    return replace(item, answers=donor.answers)
