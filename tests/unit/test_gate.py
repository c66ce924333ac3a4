"""The gate: no capability, no heads."""

import numpy as np
import pytest

import shown
import tiny
from csloc_utils.errors import GateError, InputError
from csloc_utils.gate import check_capability
from csloc_utils.measure import Evaluator
from csloc_utils.tasks import Item, Task


@pytest.fixture(scope="module")
def model():
    return tiny.head_model("llama")


def gate(model, task, **options):
    return check_capability(Evaluator(model, task, store=":memory:", progress=False), **options)


def test_capability_that_is_there(model):
    result = gate(model, shown.task(model))
    assert result.passed and result.accuracy == 1 and result.require() is result
    assert result.above_permuted.low > 0
    assert result.to_dict()["passed"] is True


def test_permuted_answers_are_no_capability(model):
    task = shown.task(model)
    answers = [item.answers for item in task.locate]
    wrong = np.random.default_rng(0).permutation(len(answers))
    items = [Item(i.prompt, answers[w]) for i, w in zip(task.locate, wrong, strict=True)]
    shuffled = Task("shuffled", "none", "continuation", shown.PREFIX, items, task.verify, 0)
    result = gate(model, shuffled)
    assert not result.passed
    with pytest.raises(GateError, match="does not show this capability.*nothing is claimed"):
        result.require()


def test_always_giving_the_commonest_answer_is_no_capability(model):
    """All accuracy comes from one frequent answer: the permuted items have it as well."""
    prompts = shown.questions(30)
    answers = shown.own_answers(model, prompts)
    common = max(set(answers), key=answers.count)
    prompts = [p for p, a in zip(prompts, answers, strict=True) if a == common]
    items = [Item(p, (common if i % 4 else "e",)) for i, p in enumerate(prompts)]
    task = Task("common", "none", "continuation", shown.PREFIX, items, [Item("e =", ("e",))], 0)
    result = gate(model, task)
    assert result.accuracy >= 0.5 and not result.passed


def test_same_answer_everywhere(model):
    items = [Item(p, ("7",)) for p in shown.questions(6)]
    task = Task("same", "none", "continuation", "", items, [Item("e =", ("e",))], 0)
    with pytest.raises(InputError, match="the same answer"):
        gate(model, task)


def test_multiple_choice_against_chance(model):
    prompts = shown.questions(40)
    answers = shown.own_answers(model, prompts)
    items = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        rest = [w for w in "3 4 5 6".split() if w != answer][:3]
        rest.insert(i % 4, answer)
        items.append(Item(prompt, (), tuple(rest), i % 4))
    known = Task("known", "c", "choice", shown.PREFIX, items[:30], items[30:], 0)
    assert gate(model, known).passed
    guesses = [Item(i.prompt, (), i.choices, n % 4) for n, i in enumerate(items[3:])]
    guessed = Task("guessed", "c", "choice", shown.PREFIX, guesses[:30], guesses[30:], 0)
    assert not gate(model, guessed).passed
