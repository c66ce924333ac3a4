"""Defects that a review found: each has a test that it stays mended."""

import copy
import json
import sqlite3
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models

import shown
import tiny
from csloc_utils import cli, locating, sources
from csloc_utils.errors import GateError, InputError
from csloc_utils.gate import check_capability
from csloc_utils.generation import generate
from csloc_utils.heads import Head
from csloc_utils.measure import Evaluator
from csloc_utils.models import HeadModel, load_model
from csloc_utils.search import paper
from csloc_utils.store import Store
from csloc_utils.tasks import Item, Task, load_task


@pytest.fixture(scope="module")
def model():
    return tiny.head_model("llama")


@pytest.fixture(scope="module")
def task(model):
    return shown.task(model)


@pytest.fixture
def folder(task, tmp_path, monkeypatch):
    """A checkpoint and two task files in the working folder."""
    model = tiny.head_model("llama")
    tiny.hf_model("llama").save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    header = {"task": {"name": "shown", "prefix": shown.PREFIX}}
    lines = [
        {"prompt": item.prompt, "answer": item.answers[0], "split": split}
        for split in ("locate", "verify")
        for item in getattr(task, split)
    ]
    write(tmp_path / "shown.jsonl", [header, *lines])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(line, capsys):
    status = cli.main(line.split())
    return status, *capsys.readouterr()


def is_one_bad_line(status, errors):
    return status == 2 and errors.startswith("csloc: error: ") and errors.count("\n") == 1


LOCATE = (
    "locate --model model --task shown.jsonl --controls none --dtype float32 --quiet "
    "--budget 20 --random 3 --k 2 "
)


def changed(**settings):
    """The tiny llama's weights under another configuration."""
    hf = tiny.hf_model("llama")
    config = copy.deepcopy(hf.config)
    for name, value in settings.items():
        setattr(config, name, value)
    other = type(hf)(config).float().eval()
    other.load_state_dict(hf.state_dict())
    return HeadModel(other, tiny.tokenizer(), "changed")


def test_the_configuration_is_part_of_what_the_store_keys_on(model, task, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10.0}
    other = changed(rope_parameters=rope)
    store = tmp_path / "store"
    Evaluator(model, task, store=store, progress=False).baseline["logprob"]
    shared = Evaluator(other, task, store=store, progress=False).baseline["logprob"]
    alone = Evaluator(other, task, store=":memory:", progress=False).baseline["logprob"]
    np.testing.assert_allclose(shared, alone)


def test_a_checkpoint_that_lacks_a_weight_is_refused(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model" / "model.safetensors")
    del weights["model.layers.0.self_attn.o_proj.weight"]
    save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError):
        load_model(folder / "model", dtype="float32")


def test_a_head_whose_values_are_zero_is_accepted():
    hf = copy.deepcopy(tiny.hf_model("llama"))
    with torch.no_grad():
        hf.model.layers[0].self_attn.v_proj.weight[:12] = 0
    HeadModel(hf, tiny.tokenizer())


def test_a_model_without_heads_that_matter_is_explained(monkeypatch):
    """The message itself fails: Envoy has no `_path`."""
    hf = copy.deepcopy(tiny.hf_model("llama"))
    with torch.no_grad():
        hf.lm_head.weight.zero_()
    with pytest.raises(InputError, match="changes nothing"):
        HeadModel(hf, tiny.tokenizer())


def test_nan_weights_are_named_as_such():
    hf = copy.deepcopy(tiny.hf_model("llama"))
    with torch.no_grad():
        hf.lm_head.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="(?i)nan|finite"):
        HeadModel(hf, tiny.tokenizer())


def plain_tokenizer():
    words = {word: i for i, word in enumerate(tiny.WORDS)}
    tokens = Tokenizer(token_models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens)


@pytest.mark.parametrize("padding", [None, "[PAD]"])
def test_a_tokenizer_without_a_usable_padding_token(padding):
    """None at all; or one that was added and has no row in the embedding."""
    tokenizer = plain_tokenizer()
    if padding:
        tokenizer.add_special_tokens({"pad_token": padding})
    model = HeadModel(copy.deepcopy(tiny.hf_model("llama")), tokenizer)
    items = [Item("1 =", ("2",)), Item("3 4 =", ("5",))]
    task = Task("t", "t", "continuation", "", items, [Item("6 7 =", ("1",))], 0)
    assert np.isfinite(
        Evaluator(model, task, store=":memory:", progress=False).baseline["logprob"]
    ).all()


def test_a_text_item_with_two_texts_is_refused_or_scored_once(tmp_path, model):
    lines = [
        {"task": {"scoring": "text"}},
        {"prompt": "1 2", "answer": ["3 4", "5 6"], "split": "locate"},
        {"prompt": "3 2", "answer": "7 4", "split": "locate"},
        {"prompt": "3 5", "answer": "7 1", "split": "verify"},
    ]
    write(tmp_path / "text.jsonl", lines)
    try:
        task = load_task(tmp_path / "text.jsonl")
    except InputError:
        return
    baseline = Evaluator(model, task, store=":memory:", progress=False).baseline
    assert baseline["logprob"].shape == (2,)


def test_tied_choices_are_no_right_answer():
    """bfloat16 logits tie often; a model that says nothing must not score 1."""
    letters = ("A", "B", "C", "D")
    items = [
        Item(f"{a} Answer:", (), letters, i % 4) for i, a in enumerate("1 2 3 4 5 6 7 8".split())
    ]
    task = Task("t", "t", "choice", "", items[:4], items[4:], 0)
    from csloc_utils.scoring import combine, encode

    encoded = encode(task, task.locate, tiny.tokenizer())
    flat = np.full((1, len(encoded.probes)), -1.0)
    accuracy = combine(encoded, flat, np.zeros_like(flat, bool))["accuracy"]
    assert accuracy.mean() == pytest.approx(0.25)


def test_chance_is_that_of_the_items_that_are_scored(model):
    prompts = [f"{a} {b} Answer:" for a in "3456" for b in "34567"]
    few, many = ("A", "B"), ("A", "B", "C", "D")
    items = [Item(p, (), few if i < 10 else many, i % 2) for i, p in enumerate(prompts)]
    task = Task("t", "t", "choice", "", items[:10], items[10:], 0)
    gate = check_capability(Evaluator(model, task, store=":memory:", progress=False))
    assert gate.chance == 0.5


def test_the_gate_copes_with_long_answers(model):
    """Another item's answer may be too long behind this prompt."""
    items = [
        Item("1 " * 55 + "2 =", ("3",)),
        Item("4 =", ("5 " * 20 + "6",)),
        Item("5 =", ("7 " * 20 + "6",)),
    ]
    task = Task("t", "t", "continuation", "", items, [Item("6 7 =", ("1",))], 0)
    check_capability(Evaluator(model, task, store=":memory:", progress=False))


def test_one_item_is_not_said_to_have_the_same_answer_as_others(model, task):
    evaluator = Evaluator(model, task, n_items=1, store=":memory:", progress=False)
    with pytest.raises((GateError, InputError)) as caught:
        check_capability(evaluator)
    assert "same answer" not in str(caught.value)


def test_heads_that_no_mask_had_off_are_not_named(model, task):
    """`k > seen` is refused, but never-ablated heads still fill up the k."""
    evaluator = Evaluator(model, task, store=":memory:", progress=False)
    found = paper(evaluator, 6, 7, 1, "bernoulli", seed=0)
    assert all(row["n_masks"] > 0 for row in found.table)


# The store


def test_a_new_store_can_be_opened_by_many_at_once(tmp_path):
    def open_and_use(_):
        return Store(tmp_path / "s").context({"a": 1}, ["logprob"])

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(open_and_use, range(24))) == {1}


def test_another_programs_database_is_refused(tmp_path):
    database = sqlite3.connect(tmp_path / "s")
    database.execute("CREATE TABLE x (a)")
    database.execute("PRAGMA user_version = 1")
    database.close()
    with pytest.raises(InputError):
        Store(tmp_path / "s").context({}, ["logprob"])


def test_a_store_that_cannot_be_written_later_is_one_line(folder, capsys, monkeypatch):
    """Read-only file, full disk, lock held by another run: sqlite3 errors after opening."""
    put = Store.put

    def readonly(self, *args):
        self._db.execute("PRAGMA query_only = ON")
        put(self, *args)

    monkeypatch.setattr(Store, "put", readonly)
    status, _, errors = run(LOCATE.replace("--quiet", "--quiet --no-verify"), capsys)
    assert is_one_bad_line(status, errors) and "as a store" in errors


# The command line


def test_more_than_half_of_the_heads_is_refused_before_the_search(folder, capsys, monkeypatch):
    monkeypatch.setattr(Evaluator, "_score", lambda *a: pytest.fail("measured"))
    status, _, errors = run(LOCATE + "--k 7 --size 3 --budget 30", capsys)
    assert is_one_bad_line(status, errors)


def test_failures_of_ours_are_one_line_and_no_gate(folder, capsys, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("csloc_utils.measure.probe_logits", broken)
    status, _, errors = run(LOCATE, capsys)
    assert status == 3 and errors.count("\n") == 1 and "ZeroDivisionError" in errors


def test_a_truncated_checkpoint_is_one_line(folder, capsys):
    with open(folder / "model" / "model.safetensors", "r+b") as file:
        file.truncate(3000)
    status, _, errors = run(LOCATE, capsys)
    assert is_one_bad_line(status, errors)


def test_a_truncated_gguf_is_one_line(folder, capsys):
    (folder / "cut.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1))
    status, _, errors = run(LOCATE.replace("--model model", "--model cut.gguf"), capsys)
    assert is_one_bad_line(status, errors)


@pytest.mark.parametrize(
    "option", ["--device meta", f"--json {'a' * 300}.json", f"--model {'a' * 300}"]
)
def test_bad_option_is_one_line(folder, capsys, option):
    status, _, errors = run(LOCATE + option, capsys)
    assert is_one_bad_line(status, errors)


def test_json_name_that_fits_but_leaves_no_room_for_the_scratch_file(folder, capsys):
    name = "a" * 245 + ".json"
    status, _, errors = run(LOCATE + f"--json {name}", capsys)
    assert status == 0 and (folder / name).exists()


def test_json_in_a_folder_without_permission_is_known_before_the_search(folder, monkeypatch):
    """The report is written beside its file first, so the folder itself must be writable."""
    from csloc_utils import results

    place = folder / "out.json"
    place.write_text("{}")

    def denied(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(results.Path, "touch", denied)
    with pytest.raises(InputError, match="Permission denied"):
        results.check_writable(place)


def test_json_through_a_link_changes_what_it_points_to(folder, capsys):
    (folder / "real.json").write_text("{}")
    (folder / "link.json").symlink_to("real.json")
    run(LOCATE + "--json link.json", capsys)
    assert (folder / "link.json").is_symlink()
    assert json.loads((folder / "real.json").read_text())


def test_the_result_is_kept_when_the_terminal_is_gone(folder, monkeypatch):
    """`csloc locate --json out.json | head -1`, or a terminal that cannot show "−"."""

    def broken(*args):
        raise BrokenPipeError

    monkeypatch.setattr(locating, "print_search", broken)
    monkeypatch.setattr(cli.os, "dup2", lambda *args: None)
    monkeypatch.setattr(cli.sys.stdout, "fileno", lambda: 1, raising=False)
    assert cli.main((LOCATE + "--json out.json").split()) == 141
    assert (folder / "out.json").exists()


def test_one_item_is_too_few_to_tell(folder, capsys):
    status, _, errors = run(LOCATE + "--items 1", capsys)
    assert is_one_bad_line(status, errors) and "two or more" in errors


def test_the_target_is_no_control(folder, capsys):
    line = LOCATE.replace("--controls none", "--controls shown.jsonl")
    status, _, errors = run(line, capsys)
    assert is_one_bad_line(status, errors)


def test_the_seed_in_the_report_is_the_seed_that_was_used(folder, capsys):
    text = (folder / "shown.jsonl").read_text()
    (folder / "shown.jsonl").write_text(text.replace('"name"', '"seed": 7, "name"', 1))
    run(LOCATE + "--json out.json", capsys)
    report = json.loads((folder / "out.json").read_text())
    assert report["seed"] == report["task"]["seed"]


# Python: one clear InputError each

MISUSE = {
    "task by name": lambda m, t: Evaluator(m, "multiplication", store=":memory:"),
    "model by name": lambda m, t: Evaluator("smollm2-135m-q4", t, store=":memory:"),
    "bare transformers model": lambda m, t: Evaluator(m.hf, t, store=":memory:"),
    "no items": lambda m, t: Evaluator(m, t, store=":memory:", items=()),
    "chunk 2.5": lambda m, t: Evaluator(m, t, store=":memory:", chunk=2.5).baseline,
    "ragged masks": lambda m, t: m.grid.check_masks([[1, 0], [1]]),
    "mask of names": lambda m, t: m.grid.mask(["L0H1"]),
    "mask of one head": lambda m, t: m.grid.mask(Head(0, 1)),
    "head by number": lambda m, t: m.grid.parse([3]),
    "half a head": lambda m, t: m.grid.head(1.5),
    "unknown score": lambda m, t: (
        Evaluator(m, t, store=":memory:", progress=False)
        .measure(m.grid.mask([Head(0, 0)]))
        .effects("bleu")
    ),
    "model None": lambda m, t: load_model(None),
    "no tokenizer": lambda m, t: HeadModel(copy.deepcopy(tiny.hf_model("llama")), None),
    "one prompt": lambda m, t: generate(m, "1 2", m.grid.single_masks()),
    "no prompt": lambda m, t: generate(m, [], m.grid.single_masks()),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_from_python(name, model, task):
    with pytest.raises(InputError):
        MISUSE[name](model, task)


def test_a_long_name_is_no_model():
    with pytest.raises(InputError):
        sources.find_source("a" * 300)


def test_docstring_of_the_lasso_has_its_references_section():
    from csloc_utils.recovery import HeadLasso

    assert "References\n" in HeadLasso.__doc__
