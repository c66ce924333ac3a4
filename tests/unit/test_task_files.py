"""Tasks from files: what is read, and every mistake named by file and line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from csloc_utils.errors import InputError
from csloc_utils.tasks import Item, load_task

FOLDER = os.environ.get("CSLOC_DATASETS", "")  # public evaluation items, where somebody has them


def write(path: Path, *records: object) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def qa(n: int, **more: object) -> list[dict]:
    return [{"prompt": f"q{i}", "answer": f"a{i}", **more} for i in range(n)]


def test_own_file_with_everything(tmp_path):
    header = {
        "name": "plurals",
        "capability": "forming a plural",
        "prefix": "one cat, two cats\n",
        "delimiter": "",
        "description": "d",
        "scoring": "continuation",
    }
    path = write(
        tmp_path / "own.jsonl",
        {"task": header},
        {"prompt": "one mouse, two", "answer": " mice", "split": "locate", "note": 1},
        {"prompt": "one fish, two", "answer": ["fish", "fishes"], "split": "verify", "fact": "f"},
    )
    own = load_task(path)
    assert (own.name, own.capability, own.scoring) == (
        "plurals",
        "forming a plural",
        "continuation",
    )
    assert own.prefix == "one cat, two cats\n" and own.delimiter == "" and own.description == "d"
    assert own.locate == (Item("one mouse, two", (" mice",)),)
    assert own.verify == (Item("one fish, two", ("fish", "fishes"), fact="f"),)
    assert own.source == str(path) and own == load_task(str(path))


def test_own_file_without_splits(tmp_path):
    path = write(tmp_path / "own.jsonl", *qa(20), *[{**r, "prompt": r["prompt"]} for r in qa(3)])
    own = load_task(path, seed=5)
    assert own.name == own.capability == "own" and own.seed == 5 and own.prefix == ""
    assert {len({i.fact for i in half}) for half in (own.locate, own.verify)} == {10}
    assert load_task(path, seed=6).locate != own.locate
    facts = [{**row, "fact": str(i // 5)} for i, row in enumerate(qa(20))]
    by_fact = load_task(write(tmp_path / "facts.jsonl", *facts))
    assert len(by_fact.locate) == len(by_fact.verify) == 10


def test_the_headers_seed_holds_unless_another_is_given(tmp_path):
    path = write(tmp_path / "own.jsonl", {"task": {"seed": 7}}, *qa(20))
    assert load_task(path).seed == 7 and load_task(path, seed=0).seed == 0
    assert load_task(path) == load_task(path, seed=7)


def test_shots_are_taken_out_of_both_halves(tmp_path):
    path = write(tmp_path / "own.jsonl", {"task": {"shots": 3, "prefix": "Answer.\n"}}, *qa(21))
    own = load_task(path)
    lines = own.prefix.splitlines()
    assert lines[0] == "Answer." and len(lines) == 4 and own.prefix.endswith("\n")
    left = {own.join(i, i.answers[0])[len(own.prefix) :] for i in own.items("all")}
    assert len(left) == 18 and left.isdisjoint(lines)


def test_own_choices(tmp_path):
    row = {"prompt": "Which is a metal?", "choices": ["iron", "wood"], "answer": 0}
    rows = [row, {**row, "choices": ["oak", "tin"], "answer": 1}]
    rows.append({"prompt": "q", "choices": ["a", "b", "c", "d"], "answer": 3})
    own = load_task(write(tmp_path / "own.jsonl", *rows))
    assert own.scoring == "choice" and own.chance == pytest.approx((0.5 + 0.5 + 0.25) / 3)
    assert {i.right for i in own.items("all")} == {("iron",), ("tin",), ("d",)}


def test_files_as_other_systems_write_them(tmp_path):
    """A byte order mark, CRLF, blank lines and U+2028 inside a text are no mistakes."""
    text = "\r\n".join(["", *map(json.dumps, qa(4)), "", '{"prompt": "x\u2028y", "answer": "é"}'])
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    own = load_task(path)
    assert len(own.items("all")) == 5
    assert Item("x\u2028y", ("é",)) in own.items("all")


GOOD = '{"prompt": "q", "answer": "a"}'
CHOICE = '{"prompt": "q", "choices": ["a", "b"], "answer": %s}'
BAD_FILES = {
    "empty file": ("", 1, "no items"),
    "only blank lines": ("\n\n", 1, "no items"),
    "only a header": ('{"task": {"name": "x"}}', 1, "no items"),
    "a list": (f"[{GOOD},\n{GOOD}]", 1, "JSON list"),
    "bad JSON": (f"{GOOD}\n{{'prompt': 'q'}}", 2, "not JSON"),
    "one object over lines": ('{\n"prompt": "q",\n"answer": "a"}', 1, "one whole object"),
    "a string": (f'{GOOD}\n"q"', 2, "not a JSON object"),
    "a field twice": ('{"prompt": "q", "prompt": "r", "answer": "a"}', 1, "same field twice"),
    "deep nesting": ('{"prompt": ' + "[" * 100000, 1, "not JSON"),
    "prompt missing": (f'{GOOD}\n\n{{"answer": "a"}}', 3, "'prompt' is missing"),
    "prompt misspelt": ('{"promt": "q", "answer": "a"}', 1, "unknown field 'promt'"),
    "prompt in capitals": ('{"Prompt": "q", "answer": "a"}', 1, "write 'prompt'"),
    "prompt a number": ('{"prompt": 7, "answer": "a"}', 1, "'prompt' must be text"),
    "prompt null": ('{"prompt": null, "answer": "a"}', 1, "'prompt' must be text"),
    "prompt empty": ('{"prompt": "", "answer": "a"}\n' + GOOD, 1, "without prompt"),
    "half a character": ('{"prompt": "\\ud83d", "answer": "a"}', 1, "surrogate"),
    "answer missing": ('{"prompt": "q"}', 1, "'answer' is missing"),
    "answer misspelt": ('{"prompt": "q", "anwser": "a"}', 1, "write 'answer'"),
    "answer empty": ('{"prompt": "q", "answer": ""}', 1, "empty text"),
    "answer blank": ('{"prompt": "q", "answer": ["a", " "]}', 1, "empty text"),
    "no answers": ('{"prompt": "q", "answer": []}', 1, "no answer"),
    "answer a number": ('{"prompt": "q", "answer": 56}', 1, "in quotes"),
    "answer true": ('{"prompt": "q", "answer": true}', 1, "bare value true"),
    "answer null": ('{"prompt": "q", "answer": null}', 1, "'answer' must be text"),
    "a number among answers": ('{"prompt": "q", "answer": ["a", 1]}', 1, "must be text"),
    "answer twice": ('{"prompt": "q", "answer": ["a", "a"]}', 1, "twice"),
    "index too large": (CHOICE % 2, 1, "0 to 1"),
    "index negative": (CHOICE % -1, 1, "0 to 1"),
    "index as text": (CHOICE % '"a"', 1, "index"),
    "index true": (CHOICE % "true", 1, "index"),
    "choices misspelt": ('{"prompt": "q", "choice": ["a", "b"], "answer": 0}', 1, "'choices'"),
    "choices a text": ('{"prompt": "q", "choices": "ab", "answer": 0}', 1, "list of texts"),
    "no choices": ('{"prompt": "q", "choices": [], "answer": 0}', 1, "empty"),
    "one choice": ('{"prompt": "q", "choices": ["a"], "answer": 0}', 1, "at least two"),
    "same choice twice": ('{"prompt": "q", "choices": ["a", "a "], "answer": 0}', 1, "twice"),
    "a number as choice": ('{"prompt": "q", "choices": [1, 2], "answer": 0}', 1, "must be text"),
    "kinds mixed": (f"{GOOD}\n{CHOICE % 0}", 2, "has choices"),
    "two answers": (f'{GOOD}\n{{"prompt": "q", "answer": "b"}}', 2, "line 1"),
    "two right choices": (f"{CHOICE % 0}\n{CHOICE % 1}", 2, "line 1"),
    "unknown split": ('{"prompt": "q", "answer": "a", "split": "train"}', 1, "unknown split"),
    "split null": ('{"prompt": "q", "answer": "a", "split": null}', 1, "unknown split"),
    "split misspelt": ('{"prompt": "q", "answer": "a", "splits": "verify"}', 1, "'split'"),
    "split half given": (
        f'{GOOD}\n{{"prompt": "r", "answer": "b", "split": "verify"}}',
        2,
        "all or none",
    ),
    "fact in both": (
        '{"prompt": "q", "answer": "a", "split": "locate", "fact": "f"}\n'
        '{"prompt": "r", "answer": "a", "split": "verify", "fact": "f"}',
        2,
        "in line 1 in locate",
    ),
    "no locate items": ('{"prompt": "q", "answer": "a", "split": "verify"}', 1, "no locate"),
    "fact a number": ('{"prompt": "q", "answer": "a", "fact": 7}', 1, "'fact' must be text"),
    "one fact": (GOOD, 1, "2 facts"),
    "header key": ('{"task": {"nmae": "x"}}\n' + GOOD, 1, "unknown key 'nmae'"),
    "header type": ('{"task": {"prefix": ["x"]}}\n' + GOOD, 1, "'prefix' must be text"),
    "header seed": ('{"task": {"seed": "1"}}\n' + GOOD, 1, "whole number"),
    "header scoring": ('{"task": {"scoring": "bleu"}}\n' + GOOD, 1, "unknown scoring"),
    "header shots": ('{"task": {"shots": -1}}\n' + GOOD, 1, "0 or more"),
    "too many shots": ('{"task": {"shots": 2}}\n' + GOOD, 1, "4 facts"),
    "shots beside splits": (
        '{"task": {"shots": 1}}\n{"prompt": "q", "answer": "a", "split": "locate"}',
        1,
        "without a split",
    ),
    "header not alone": ('{"task": {"name": "x"}, "answer": "a"}', 1, "beside the task header"),
    "header late": (GOOD + '\n{"task": {"name": "x"}}', 2, "first line"),
    "header no object": ('{"task": "x"}\n' + GOOD, 1, "'prompt' is missing"),
    "scoring without choices": ('{"task": {"scoring": "choice"}}\n' + GOOD, 2, "no choices"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case, tmp_path):
    text, line, says = BAD_FILES[case]
    path = tmp_path / "own.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_task(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ") and says in message
    assert "\n" not in message and len(message) < len(str(path)) + 250


def test_bad_bytes_and_paths(tmp_path):
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes((GOOD + '\n{"prompt": "caf\xe9", "answer": "a"}').encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.jsonl:2: not UTF-8"):
        load_task(latin)
    wide = tmp_path / "wide.jsonl"
    wide.write_bytes(GOOD.encode("utf-16"))
    with pytest.raises(InputError, match=r"wide\.jsonl:1: not UTF-8"):
        load_task(wide)
    with pytest.raises(InputError, match="a folder"):
        load_task(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        load_task(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="cannot be read"):
        load_task(latin / "below.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        load_task("a\0b.jsonl")


@pytest.mark.skipif(not os.path.isdir(FOLDER), reason="CSLOC_DATASETS names no folder")
def test_public_items_load():
    for path in sorted(Path(FOLDER).glob("*.jsonl")):
        if path.stem == "profanity":  # its items have no prompt, only words
            with pytest.raises(InputError, match=r"profanity\.jsonl:1: .*'prompt' is missing"):
                load_task(path)
            continue
        own = load_task(path)
        assert len(own.items("all")) > 100 and abs(len(own.locate) - len(own.verify)) < 5
