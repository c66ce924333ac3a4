"""What breaks: texts made by hand, verdicts on answers, entropy, kinds of ablation."""

import doctest
import itertools

import numpy as np
import pytest
import torch

from csloc_utils import degeneration
from csloc_utils.ablation import masked_logits
from csloc_utils.degeneration import (
    answers_under,
    distinct,
    judge_answer,
    kinds_of_loss,
    longest_repeat,
    next_token_entropy,
    shape,
    texts_under,
)
from csloc_utils.errors import InputError
from csloc_utils.heads import Head
from csloc_utils.tasks import Item, Task
from fakes import FakeEvaluator, small_grid
from tiny import head_model


def test_distinct_on_strings_made_by_hand():
    words = "the cat sat on the mat".split()
    assert distinct(words, 1) == pytest.approx(5 / 6)
    assert distinct(words, 2) == 1
    assert distinct(["no"] * 10, 1) == 0.1
    assert distinct(["no"] * 10, 3) == pytest.approx(1 / 8)
    assert distinct("abababab", 2) == pytest.approx(2 / 7)
    assert np.isnan(distinct("ab", 3)) and np.isnan(distinct([], 1))
    with pytest.raises(InputError):
        distinct("ab", 0)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("abcdefg", 0),
        ("aaaa", 1),
        ("abcabca", 1),  # n = 3, with the beginning of a third copy
        ("abcab", 0),  # one copy and a half is no repetition
        ("xyabab", 4 / 6),
        ("aabcdbcdbcde", 9 / 12),  # the longer run counts, not the shorter "aa"
        ("abcxabc", 0),  # said twice, but not at once
        ("a", 0),
    ],
)
def test_longest_repeat_on_strings_made_by_hand(text, share):
    assert longest_repeat(text) == pytest.approx(share)


def test_longest_repeat_agrees_with_trying_every_passage():
    def by_trial(text):
        best = 0
        for i, j in itertools.combinations(range(len(text) + 1), 2):
            part = text[i:j]
            for p in range(1, len(part) // 2 + 1):
                if all(part[k] == part[k + p] for k in range(len(part) - p)):
                    best = max(best, len(part))
        return best / len(text)

    rng = np.random.default_rng(0)
    for _ in range(60):
        text = "".join(rng.choice(list("ab"), rng.integers(1, 12)))
        assert longest_repeat(text) == pytest.approx(by_trial(text)), text
    assert np.isnan(longest_repeat(""))


def test_measures_see_only_which_parts_are_equal():
    text = "to be or not to be or not to be".split()
    ids = [{w: 7 * i + 3 for i, w in enumerate(sorted(set(text)))}[w] for w in text]
    assert longest_repeat(text) == longest_repeat(ids) == longest_repeat(text[::-1])
    for n in (1, 2, 3):
        assert distinct(text, n) == distinct(ids, n) == distinct(text[::-1], n)


def test_shapes_and_verdicts():
    assert [shape(t) for t in ("42", "7", "Addis Ababa", "São", "x2", "")] == [
        "9",
        "9",
        "A A",
        "A",
        "a9",
        "",
    ]
    numbers, towns = ["4", "12", "144"], ["Paris", "Addis Ababa"]
    assert judge_answer(" 12\n3 × 4", ["12"], numbers) == "right"
    assert judge_answer("12.", ["12"], numbers) == "right"
    assert judge_answer(" 13", ["12"], numbers) == "wrong"
    assert judge_answer(" 1212121212", ["12"], numbers) == "degenerate"  # too long for an answer
    for text in ("", "\n", " the the the", " 12 12", " =", "one"):
        assert judge_answer(text, ["12"], numbers) == "degenerate", text
    assert judge_answer(" Rome, of course", ["Paris"], towns) == "wrong"
    assert judge_answer(" the the", ["Paris"], towns) == "degenerate"
    assert judge_answer(" rome", ["Paris"], towns) == "degenerate"
    assert not doctest.testmod(degeneration).failed


def test_entropy_is_that_of_the_masked_models_next_token():
    model = head_model("llama")
    texts, starts = [[2, 3, 4, 5, 6], [7, 8, 9], [4, 4, 4, 4]], [2, 1, 4]
    mask = model.grid.mask([Head(0, 1), Head(2, 3)])
    found = next_token_entropy(model, texts, starts, mask)
    assert [len(row) for row in found] == [3, 2, 0]
    for text, start, row in zip(texts, starts, found):
        logits = masked_logits(model, torch.tensor([text]), masks=mask[None])[0].double()
        p = logits.softmax(-1)
        alone = -(p * p.log()).sum(-1)[start - 1 : len(text) - 1]
        assert np.allclose(row, alone.numpy(), atol=1e-4)
    intact = next_token_entropy(model, texts, starts, np.zeros(model.grid.size, bool))
    assert np.abs(intact[0] - found[0]).max() > 1e-3
    with pytest.raises(InputError, match="own part"):
        next_token_entropy(model, texts, [0, 1, 1], mask)


def test_texts_under_masks_are_measured_one_by_one():
    model = head_model("llama")
    masks = np.array([np.zeros(model.grid.size, bool), model.grid.mask([Head(1, 0), Head(0, 2)])])
    both = texts_under(model, ["A B C", "1 + 2"], masks, max_new_tokens=6)
    assert both[["mask", "prompt"]].values.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    alone = texts_under(model, ["1 + 2"], masks[[1]], max_new_tokens=6)
    assert alone["text"][0] == both["text"][3]
    assert alone["entropy"][0] == pytest.approx(both["entropy"][3], abs=1e-4)
    words = both["text"][0].split()
    assert both["n_tokens"].tolist() == [6] * 4
    assert both["distinct_1"][0] == pytest.approx(distinct(words, 1))
    assert both["repeat"][0] == pytest.approx(longest_repeat(words))


def adding(a, b):
    return Item(prompt=f"{a} + {b} =", answers=(str(a + b),), fact=f"{a}+{b}")


def test_answers_under_masks_are_judged_against_their_own_item():
    model = head_model("llama")
    locate, verify = (adding(1, 1), adding(1, 2)), (adding(2, 3), adding(3, 5))
    task = Task("sums", "adding", "continuation", "A B C D A B C D ", locate, verify, 0)
    none = np.zeros((1, model.grid.size), bool)
    frame = answers_under(model, task, verify, none)
    assert frame["fact"].tolist() == ["2+3", "3+5"]
    first = frame["text"][0].strip().splitlines()[0]
    cheat = (Item(prompt=verify[0].prompt, answers=(first,), fact="2+3"),)
    assert answers_under(model, task, cheat, none)["verdict"].tolist() == ["right"]
    plain = Task("prose", "", "text", "", locate, verify, 0)
    with pytest.raises(InputError, match="no answers"):
        answers_under(model, plain, verify, none)


def test_a_constant_is_told_from_content():
    grid = small_grid()
    zero = {"sums": FakeEvaluator(grid, {0: -2.0, 1: -2.0})}
    mean = {"sums": FakeEvaluator(grid, {0: -0.1, 1: -1.9})}
    sets = {"constant": [grid.head(0)], "content": [grid.head(1)], "idle": [grid.head(2)]}
    table = kinds_of_loss({"zero": zero, "mean": mean}, sets).set_index(["set", "kind"])
    verdicts = table["verdict"]
    assert verdicts["constant", "mean"] == "constant" and verdicts["content", "mean"] == "content"
    assert verdicts["idle", "mean"] == verdicts["idle", "zero"] == "no damage"
    assert np.isnan(table.loc[("idle", "mean"), "left"])
    assert table.loc[("constant", "zero"), "left"] == pytest.approx(1)
    assert table.loc[("constant", "mean"), "left"] == pytest.approx(0.05, abs=0.1)
    with pytest.raises(InputError, match="zero ablation"):
        kinds_of_loss({"mean": mean}, sets)
    with pytest.raises(InputError, match="other tasks"):
        kinds_of_loss({"zero": zero, "mean": {"rhyme": mean["sums"]}}, sets)
