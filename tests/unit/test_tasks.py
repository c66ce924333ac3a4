"""Tasks: no fact in two halves, the same items again from a seed, every bad file named by line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from csloc_utils.errors import InputError
from csloc_utils.tasks import BUILTIN, Item, Task, controls_for, list_tasks, load_task
from csloc_utils.tasks.files import data_path, few_shot, split_facts

ARITHMETIC = ["multiplication", "repeat-left", "addition", "subtraction"]


def task(**changes: object) -> Task:
    fields = {
        "name": "t",
        "capability": "c",
        "scoring": "continuation",
        "prefix": "",
        "locate": (Item("1 + 1 =", ("2",)),),
        "verify": (Item("2 + 2 =", ("4",)),),
        "seed": 0,
    }
    return Task(**{**fields, **changes})


# --- built-in tasks ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_is_large_enough_and_disjoint(name):
    for seed in range(5):
        built = load_task(name, seed)
        assert built.name == name and built.seed == seed and built.source == "built-in"
        assert built.capability and built.description
        assert len(built.verify) >= 40 and len(built.locate) >= 24
        facts = [{item.fact for item in half} for half in (built.locate, built.verify)]
        assert not facts[0] & facts[1]
        for item in built.items("all"):  # nothing is answered by the few-shot examples
            texts = [built.join(item, answer)[len(built.prefix) :] for answer in item.right]
            assert not any(text + "\n" in built.prefix.splitlines(True) for text in texts)


def test_the_seed_decides_split_and_examples_but_not_the_items():
    for name in BUILTIN:
        first, again, other = load_task(name, 1), load_task(name, 1), load_task(name, 2)
        assert first == again
        assert first.locate != other.locate
        # Lettered questions have examples of their own, the same for every seed.
        fixed = name.endswith("-letters") or not first.prefix
        assert fixed == (first.prefix == other.prefix)
    one, two = load_task("copying", 1), load_task("copying", 2)
    assert set(one.items("all")) == set(two.items("all"))


def test_the_same_task_in_another_process():
    code = (
        "from csloc_utils.tasks import load_task as t;"
        "print(*[t(n).fingerprint(t(n).items('verify', 7)) for n in ('rhyme', 'addition')])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1 and len(runs.pop().split()) == 2


def test_mirror_images_stay_together():
    for name in ("multiplication", "addition", "repeat-left"):
        built = load_task(name, 3)
        half = {}
        for split in ("locate", "verify"):
            for item in built.items(split):
                half[tuple(re.findall(r"\d+", item.prompt))] = split
        assert all(half[b, a] == split for (a, b), split in half.items())
        for line in built.prefix.splitlines():
            a, b, *_ = re.findall(r"\d+", line)
            assert (a, b) not in half and (b, a) not in half


def test_arithmetic_is_right():
    for item in load_task("multiplication").items("all"):
        a, _, b, _ = item.prompt.split()
        assert int(a) * int(b) == int(item.answers[0])
    for name in ("addition", "subtraction"):
        for item in load_task(name).items("all"):
            assert eval(item.prompt.removesuffix("=")) == int(item.answers[0])


def test_the_twin_has_the_surface_of_multiplication():
    target, twin = load_task("multiplication", 4), load_task("repeat-left", 4)
    for one, two in zip(target.items("all"), twin.items("all"), strict=True):
        assert one.prompt.removesuffix(" =") == two.prompt.removesuffix(", first number:")
        assert one.fact == two.fact
        assert two.answers == (two.prompt.split()[0],)
    cut = [re.findall(r"(?m)^\d+ × \d+", t.prefix) for t in (target, twin)]
    assert cut[0] == cut[1] and len(cut[0]) == 4


def test_copying_can_be_answered_from_the_context_only():
    items = load_task("copying").items("all")
    assert len({item.answers for item in items}) == len(items)
    for item in items:
        first, second = item.prompt.split("\n")
        words = first.split()
        assert len(set(words)) == 5
        assert words[:4] == second.split() and words[4] == item.answers[0]


def test_rhymes_never_hold_the_word_itself():
    families: dict[str, set[str]] = {}
    for item in load_task("rhyme").items("all"):
        word = item.prompt.split()[0]
        assert word not in item.answers and len(item.answers) >= 3
        families.setdefault(item.fact, set()).update(item.answers, [word])
    words = [word for family in families.values() for word in family]
    assert len(words) == len(set(words))


def test_knowledge_has_balanced_positions():
    rows = [json.loads(line) for line in data_path("tasks", "knowledge.jsonl").open()][1:]
    right = [row["answer"] for row in rows]
    assert {right.count(k) for k in range(4)} == {len(right) // 4}
    assert load_task("knowledge").chance == 0.25 and load_task("rhyme").chance == 0.0


def test_controls():
    for built in list_tasks():
        names = controls_for(built)
        assert built.name not in names and set(names) <= set(BUILTIN)
        assert len(set(names)) == len(names) >= 3
        assert ("text" in names) == (built.name != "text")
        if built.name in ARITHMETIC and built.name != "repeat-left":
            assert "repeat-left" in names
    assert "text" in controls_for(task())
    assert "capitals" not in controls_for(task(name="capitals", source="mine.jsonl"))


# --- Item and Task ----------------------------------------------------------------------------


def test_join_leaves_the_delimiter_out_where_white_space_is():
    built = task(prefix="P\n")
    assert built.join(Item("a", ("b",)), "b") == "P\na b"
    assert built.join(Item("a\n", ("b",)), "b") == "P\na\nb"
    assert built.join(Item("a", (" b",)), " b") == "P\na b"
    assert built.join(Item("", ("b",)), "b") == "P\nb"
    assert task(delimiter="").join(Item("a", ("b",)), "b") == "ab"
    assert built.context(Item("a", ("b",))) == "P\na"
    assert few_shot([Item("a", ("b", "c")), Item("d", (), ("x", "y"), 1)]) == "a b\nd y\n"


def test_samples_are_random_nested_and_repeatable():
    """lm-evaluation-harness #2598: --limit takes the first n, which biases what is measured."""
    built = load_task("multiplication", 0)
    for split in ("locate", "verify", "all"):
        whole = built.items(split)
        ten, twenty = built.items(split, 10), built.items(split, 20)
        assert ten == built.items(split, 10) and len(set(ten)) == 10
        assert set(ten) < set(twenty) and ten != whole[:10]
        assert [whole.index(item) for item in ten] == sorted(whole.index(item) for item in ten)
        assert built.items(split, len(whole)) == whole
    assert {item.fact for item in built.items("locate", 20)}.isdisjoint(
        item.fact for item in built.items("verify", 20)
    )


def test_fingerprint_is_about_what_the_model_reads():
    built = task()
    items = built.items("all")
    name = built.fingerprint(items)
    assert len(name) == 64 and name == replace(built, name="u", seed=1).fingerprint(items)
    assert name != built.fingerprint(items[:1])
    assert name != replace(built, prefix="x\n").fingerprint(items)
    assert name != replace(built, delimiter="").fingerprint(items)
    assert name != replace(built, scoring="text").fingerprint(items)
    assert name != built.fingerprint([replace(items[0], answers=("3",)), items[1]])
    assert name == built.fingerprint([replace(items[0], fact="other"), items[1]])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Item("q"), "no answer"),
        (lambda: Item("q", "56"), "list of texts"),
        (lambda: Item("q", ("",)), "empty"),
        (lambda: Item("q", (" \n",)), "empty"),
        (lambda: Item("q", (56,)), "must be text"),
        (lambda: Item("q", ("a", " a")), "twice"),
        (lambda: Item(None, ("a",)), "'prompt' must be text"),
        (lambda: Item("\ud800", ("a",)), "surrogate"),
        (lambda: Item("q", ("a",), ("a", "b"), 0), "not both"),
        (lambda: Item("q", (), ("a",), 0), "at least two"),
        (lambda: Item("q", (), ("a", "b"), 2), "0 to 1"),
        (lambda: Item("q", (), ("a", "b")), "0 to 1"),
        (lambda: Item("q", (), ("a", "b"), True), "0 to 1"),
        (lambda: Item("q", (), ("a", "a "), 0), "twice"),
        (lambda: task(scoring="bleu"), "unknown scoring"),
        (lambda: task(scoring="choice"), "needs choices"),
        (lambda: task(locate=()), "no locate items"),
        (lambda: task(verify=[]), "no verify items"),
        (lambda: task(verify=[("q", "a")]), "Item objects"),
        (lambda: task(name=" "), "no name"),
        (lambda: task(seed="0"), "whole number"),
        (lambda: task(prefix=None), "'prefix' must be text"),
        (lambda: task(verify=(Item("1 + 1 =", ("2",)),)), "in locate and in verify"),
        (lambda: task(verify=(Item("x", ("y",), fact="1 + 1 ="),)), "in locate and in verify"),
        (lambda: task(verify=(Item("1 + 1 =", ("2",), fact="z"),)), "in locate and in verify"),
        (lambda: task(prefix="2 + 2 = 4\n"), "already answers"),
        (lambda: task(verify=(Item("", ("4",)),)), "without prompt"),
        (lambda: task().items("train"), "unknown split"),
        (lambda: task().items("locate", 0), "ask for 1 to 1"),
        (lambda: task().items("verify", 2), "ask for 1 to 1"),
        (lambda: task().items("all", 1.0), "ask for 1 to 2"),
        (lambda: load_task("multiplicaton"), "did you mean 'multiplication'"),
        (lambda: load_task(""), "unknown task"),
        (lambda: load_task(7), "named by its name"),
        (lambda: load_task("capitals", seed=0.5), "whole number"),
        (lambda: split_facts([Item("q", ("a",))], 0), "2 facts, there are 1"),
        (lambda: data_path("tasks", "nothing.jsonl"), "missing from this installation"),
    ],
)
def test_bad_calls(make, says):
    with pytest.raises(InputError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_prefix_may_hold_a_longer_number():
    """12 + 2 = 14 does not give 2 + 2 = 4 away."""
    task(prefix="12 + 2 = 14\n")
    task(prefix="2 + 2 = 44\n")
