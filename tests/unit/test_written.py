"""Answers that a model writes: located on its own texts, verified by writing again."""

import copy
import dataclasses
import json

import numpy as np
import pytest

import shown
import tiny
from csloc_utils import cli, sandbox, written
from csloc_utils.errors import GateError, InputError
from csloc_utils.measure import Evaluator
from csloc_utils.models import HeadModel
from csloc_utils.tasks import Item, Task
from csloc_utils.verify import verify
from csloc_utils.written import WritingEvaluator, Written, load_written, own_answers


@pytest.fixture(scope="module")
def model():
    return tiny.head_model("llama")


def made(model, n=12, tokens=4):
    """A task whose right answers are what the model itself writes."""
    items = [Item(prompt, ("c",)) for prompt in shown.questions(n)]
    halves = items[: n // 2], items[n // 2 :]
    task = Task("made", "itself", "continuation", shown.PREFIX, *halves, 0)
    draft = Written(task, lambda item, text: 0.0, tokens, ())
    evaluator = WritingEvaluator(model, draft, "all", store=":memory:", progress=False)
    (texts,) = evaluator.texts(np.zeros((1, model.grid.size), bool))
    right = dict(zip([item.prompt for item in evaluator.items], texts))
    return Written(task, lambda item, text: float(text == right[item.prompt]), tokens, ()), right


def both(model, task, **options):
    options = dict(store=":memory:", progress=False) | options
    return [WritingEvaluator(model, task, split, **options) for split in ("locate", "verify")]


def test_heads_are_located_on_what_the_model_wrote_and_verified_by_writing(model):
    task, right = made(model)
    locate, judge = both(model, task)
    own = own_answers(locate, judge)
    assert own.accuracy == {"locate": 1.0, "verify": 1.0} and own.gate.passed
    assert own.task.scoring == "text"
    bare = len(task.task.prefix)  # the items hold the examples
    assert all(item.answers == (right[item.prompt[bare:]],) for item in own.task.items("all"))
    forced = Evaluator(model, own.task, store=":memory:", progress=False)
    # Greedy decoding would write just this (a special token is no text, and is lost).
    whole = [len(item.answers[0].split()) == task.max_new_tokens for item in forced.items]
    assert sum(whole) > 2 and (forced.baseline["accuracy"][whole] == 1).all()
    result = verify(judge, [model.grid.head(0), model.grid.head(5)], n_random=3)
    assert list(result.target.drops) == ["accuracy"]
    assert result.target.drops["accuracy"].intact == 1
    everything = judge.measure(np.ones((1, model.grid.size), bool))
    assert everything.effects("accuracy")[0] < 0


def test_in_a_chat_heads_are_located_on_the_answer_to_the_rendered_message(model):
    template = "c {{ messages[0]['content'] }} b "
    model = HeadModel(model.hf, copy.copy(model.tokenizer), "llama")
    model.tokenizer.chat_template = template
    task, _ = made(model)
    task = dataclasses.replace(task, judge=lambda item, text: 1.0, items_differ=False)
    locate, judge = both(model, task, chat=True)
    own = own_answers(locate, judge)
    item = own.task.locate[0]
    assert item.prompt == f"c {task.task.context(locate.items[0])} b "
    forced = Evaluator(model, own.task, store=":memory:", progress=False)
    whole = [len(item.answers[0].split()) == task.max_new_tokens for item in forced.items]
    assert sum(whole) > 2 and (forced.baseline["accuracy"][whole] == 1).all()


def test_each_mask_writes_its_own_text_and_is_kept(model, tmp_path, monkeypatch):
    task, _ = made(model)
    masks = model.grid.single_masks()[:3]
    (first, _) = both(model, task, store=tmp_path / "s.sqlite")
    measured = first.measure(masks)
    texts = first.texts(masks)
    assert measured.scores["accuracy"].tolist() == [first.judge(t).tolist() for t in texts]
    assert first.evaluations["equivalents"] == 3
    again, _ = both(model, task, store=tmp_path / "s.sqlite")
    monkeypatch.setattr(written, "generate", lambda *a, **k: pytest.fail("wrote again"))
    assert again.measure(masks).scores["accuracy"].tolist() == measured.scores["accuracy"].tolist()
    other = dataclasses.replace(task, max_new_tokens=2)
    with pytest.raises(pytest.fail.Exception):
        both(model, other, store=tmp_path / "s.sqlite")[0].measure(masks)


def test_the_gate_closes_for_a_model_that_always_writes_something_right_for_others_too(model):
    task, _ = made(model)
    with pytest.raises(GateError, match="solves 100%"):
        own_answers(*both(model, dataclasses.replace(task, judge=lambda item, text: 1.0)))
    with pytest.raises(GateError, match="solves 0%"):
        own_answers(*both(model, dataclasses.replace(task, judge=lambda item, text: 0.0)))
    # A task without a right answer of each item's own (swearing) is asked for its share alone.
    alike = dataclasses.replace(task, judge=lambda item, text: 1.0, items_differ=False)
    assert own_answers(*both(model, alike)).gate.passed


def rows(folder, name, made):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def test_gsm8k_is_read_with_worked_examples_and_judged_by_its_last_number(tmp_path):
    rows(
        tmp_path,
        "gsm8k",
        [
            {
                "source_id": f"g{i}",
                "question": f"How much is {i} and {i}?",
                "prompt": f"Question: How much is {i} and {i}?\nAnswer:",
                "answer": str(2 * i),
                "solution": f"{i} and {i} is {2 * i}.\n#### {2 * i}",
            }
            for i in range(3, 30)
        ],
    )
    task = load_written("gsm8k", tmp_path, shots=2)
    assert task.task.prefix.count("####") == 2 and task.task.name == "gsm8k"
    item = task.task.locate[0]
    number = int(item.prompt.split(" and ")[1].split("?")[0])
    assert task.judge(item, f" It is {2 * number}.\n") == 1
    assert task.judge(item, f" It is {2 * number + 1}.\n") == 0


def test_programs_are_run_only_with_leave_and_only_in_a_sandbox(tmp_path, monkeypatch):
    rows(
        tmp_path,
        "mbpp",
        [
            {
                "source_id": f"m{i}",
                "question": f"Add {i}.",
                "prompt": f"Add {i}.\n[BEGIN]\n",
                "answer": f"def f(x):\n    return x + {i}",
                "tests": [f"assert f(1) == {1 + i}"],
                "test_setup": "",
            }
            for i in range(12)
        ],
    )
    with pytest.raises(InputError, match="--allow-code-execution"):
        load_written("mbpp", tmp_path)
    if sandbox.available():
        task = load_written("mbpp", tmp_path, allow_code_execution=True)
        item = task.task.locate[0]
        assert task.judge(item, item.answers[0] + "\n[DONE]") == 1
        assert task.judge(item, "def f(x):\n    return x - 100\n[DONE]") == 0
    monkeypatch.setattr(sandbox, "available", lambda: None)
    with pytest.raises(InputError, match="sandbox"):
        load_written("mbpp", tmp_path, allow_code_execution=True)


def test_other_tasks_and_other_ablations_are_refused(model):
    with pytest.raises(InputError, match="no written answers"):
        load_written("multiplication")
    task, _ = made(model)
    with pytest.raises(InputError, match="zero ablation only"):
        WritingEvaluator(model, task, ablation="mean")


def test_the_command_line_writes_and_says_when_nothing_is_solved(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path / "cache"))
    tiny.hf_model("llama").save_pretrained("model")
    model.tokenizer.save_pretrained("model")
    task, right = made(model)
    monkeypatch.setattr(written, "load_written", lambda *a, **k: task)
    (tmp_path / "made.jsonl").write_text(
        "".join(
            json.dumps({"prompt": i.prompt, "answer": "c", "split": s}) + "\n"
            for s, half in (("locate", task.task.locate), ("verify", task.task.verify))
            for i in half
        )
    )
    line = (
        "locate --model model --task made.jsonl --written --controls none --k 1 --random 2 "
        "--dtype float32 --quiet --json out.json"
    )
    assert cli.main(line.split()) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert "solves 100% of locate" in capsys.readouterr().out
    assert list(report["verify"]["target"]) == ["task", "n_items", "n_facts", "accuracy"]
    wrong = dataclasses.replace(task, judge=lambda item, text: 0.0)
    monkeypatch.setattr(written, "load_written", lambda *a, **k: wrong)
    assert cli.main(line.split()) == 1
    assert "does not show this capability" in capsys.readouterr().err
