"""Tasks of lm-evaluation-harness under masks: its own numbers, with heads off beneath it."""

import builtins
import functools
import json
import logging
import random

import numpy as np
import pytest
import torch

import tiny
from csloc_utils import cli, harness, harness_lm, harness_tasks
from csloc_utils.errors import InputError
from csloc_utils.harness import HarnessEvaluator
from csloc_utils.measure import Evaluator
from csloc_utils.store import Store
from csloc_utils.tasks import Item, Task

lm_eval = pytest.importorskip("lm_eval")

N = 12
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
WRITTEN = """
task: tiny_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{cache}"}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{written}}}}"
generation_kwargs: {{until: ["Answer:"], max_gen_toks: 3, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
filter_list:
  - {{name: whole, filter: [{{function: take_first}}]}}
  - name: first
    filter:
      - {{function: regex, regex_pattern: "(\\\\S+)"}}
      - {{function: take_first}}
metadata: {{version: 1.0}}
"""
UNSAFE = CHOICE.replace("tiny_choice", "tiny_unsafe") + "unsafe_code: true\n"
HUB = CHOICE.replace("tiny_choice", "tiny_hub").replace("acc,", "acc, hf_evaluate: true,")
LOST = CHOICE.replace("tiny_choice", "tiny_lost").replace('"{data}"', '"{data}.gone"')
GROUP = "group: tiny_group\ntask: [tiny_choice, tiny_written]\n"


def continuation(model, prompt, mask=None):
    """What the model writes up to a stop, one whole forward a token, with heads off."""
    from csloc_utils.ablation import masked_logits

    ids = model.tokenizer(prompt, return_tensors="pt").input_ids
    start = ids.shape[1]
    for _ in range(3):
        masks = None if mask is None else mask[None]
        last = masked_logits(model, ids, torch.ones_like(ids), masks)[0, -1].argmax()
        ids = torch.cat([ids, last.view(1, 1)], 1)
    return model.tokenizer.decode(ids[0, start:]).split("Answer:")[0]


@functools.cache
def docs():
    """Questions; half of the written answers are what the intact model writes."""
    rng, words = random.Random(0), tiny.WORDS[2:]
    rows = []
    while len(rows) < N:
        i = len(rows)
        question = " ".join(rng.sample(words, 3 + i % 4))
        choices = rng.sample("A B C D a b c d".split(), 4)
        choices[1] += " e"  # of two tokens
        written = continuation(tiny.head_model("llama"), question)
        if "<" in written or not written:  # special tokens are no text
            continue
        row = {"question": question, "choices": choices, "right": i % 4}
        rows.append(row | {"written": written if i % 2 else "e f"})
    return rows


@pytest.fixture(scope="module")
def model():
    return tiny.head_model("llama")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "docs.jsonl"
    data.write_text("\n".join(map(json.dumps, docs())))
    texts = dict(choice=CHOICE, written=WRITTEN, unsafe=UNSAFE, hub=HUB, lost=LOST)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text.format(data=data, cache=folder / "cache"))
    (folder / "group.yaml").write_text(GROUP)
    return folder


@pytest.fixture(scope="module")
def strong(model):
    """No head, the first two layers' first half, and the last layer."""
    masks = np.zeros((3, model.grid.size), bool)
    masks[1, [0, 1, 4, 5]] = True
    masks[2, -model.grid.n_heads :] = True
    return masks


def evaluator(model, folder, name="tiny_choice", **options):
    options = dict(split="all", store=":memory:", progress=False) | options
    return HarnessEvaluator(model, name, include_path=folder, **options)


def no_runs(monkeypatch):
    def refuse(*args):
        raise AssertionError("the harness ran")

    monkeypatch.setattr(harness, "_evaluate", refuse)


def test_choices_score_as_our_own_evaluator_scores_them(model, folder, strong):
    items = [
        Item(d["question"], choices=tuple(d["choices"]), correct=d["right"], fact=f"{i}")
        for i, d in enumerate(docs())
    ]
    task = Task("own", "c", "choice", "", tuple(items[:6]), tuple(items[6:]), 0)
    own = Evaluator(model, task, "all", store=":memory:", chunk=1, progress=False)
    theirs = evaluator(model, folder)
    expected, found = own.measure(strong), theirs.measure(strong)
    for score in ("logprob", "accuracy"):
        np.testing.assert_allclose(found.scores[score], expected.scores[score], atol=1e-4)
        np.testing.assert_allclose(found.intact[score], expected.intact[score], atol=1e-4)
    assert 0 < found.scores["accuracy"].mean() < 1
    assert np.abs(found.item_effects("logprob")[1:]).max(axis=1).min() > 0.1
    np.testing.assert_array_equal(found.scores["acc"], found.scores["accuracy"])
    assert theirs.task.chance == 0.25 and theirs.task.scoring == "choice"


def test_written_answers_are_those_of_a_model_that_writes_with_heads_off(model, folder, strong):
    theirs = evaluator(model, folder, "lm-eval:tiny_written")
    found = theirs.measure(strong)
    texts = [[continuation(model, d["question"], m) for d in docs()] for m in strong]
    right = [[t == d["written"] for t, d in zip(r, docs())] for r in texts]
    np.testing.assert_array_equal(found.scores["exact_match,whole"], np.array(right, float))
    np.testing.assert_array_equal(found.scores["accuracy"], found.scores["exact_match,whole"])
    assert right[0] != right[1] and any(right[0])
    assert theirs.scores == ("accuracy", "exact_match,whole", "exact_match,first")
    assert theirs.task.chance is None


def test_the_intact_model_scores_as_in_a_plain_run_of_the_harness(model, folder):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs = evaluator(model, folder, n_items=5, seed=3)
    lm = HFLM(model.hf, tokenizer=theirs._lm.tokenizer, batch_size=8, prefix_token_id=1)
    lm.logits_cache = False
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    ids = [item.doc_id for item in theirs.items]
    task = manager.load(["tiny_choice"])
    with harness_lm.apart():
        run = lm_eval.evaluate(lm, task, samples={"tiny_choice": ids}, bootstrap_iters=0)
    samples = run["samples"]["tiny_choice"]
    assert [s["doc_id"] for s in samples] == ids
    assert [s["arguments"][0][0] for s in samples] == [item.prompt for item in theirs.items]
    np.testing.assert_array_equal([s["acc"] for s in samples], theirs.baseline["acc"])


def test_examples_come_before_the_question(model, folder):
    plain = evaluator(model, folder)
    shots = evaluator(model, folder, num_fewshot=2)
    for one, other in zip(plain.items, shots.items):
        assert other.prompt.endswith("\n\n" + one.prompt) and other.prompt.count("\n\n") == 2
    assert plain._context == evaluator(model, folder, store=plain.store)._context
    assert plain._context != evaluator(model, folder, store=plain.store, num_fewshot=2)._context


def test_halves_are_disjoint_and_samples_nested(model, folder):
    ids = {
        split: [item.doc_id for item in evaluator(model, folder, split=split).items]
        for split in ("locate", "verify", "all")
    }
    assert sorted(ids["locate"] + ids["verify"]) == ids["all"] == list(range(N))
    assert len(ids["locate"]) == len(ids["verify"]) and ids["locate"] != list(range(N // 2))
    few, more = (
        {i.doc_id for i in evaluator(model, folder, split="locate", n_items=n).items}
        for n in (2, 4)
    )
    assert few < more < set(ids["locate"])
    other = evaluator(model, folder, split="locate", seed=1)
    assert [item.doc_id for item in other.items] != ids["locate"]


def test_documents_with_the_same_content_share_a_fact_and_a_half():
    facts = harness._facts([{"q": "a", "n": 1}, {"q": "b"}, {"n": 1, "q": "a"}, {"q": "c"}])
    assert facts.tolist() == ["doc 0", "doc 1", "doc 0", "doc 3"]
    for seed in range(8):
        locate, verify = (
            harness._choose(facts, f"t/{seed}", split, None, "t") for split in ("locate", "verify")
        )
        assert not set(facts[locate]) & set(facts[verify])
        assert sorted(locate + verify) == [0, 1, 2, 3]


def test_what_is_stored_is_not_run_again(model, folder, strong, tmp_path, monkeypatch):
    store = Store(tmp_path / "s.sqlite")
    first = evaluator(model, folder, store=store, split="locate").measure(strong)
    again = evaluator(model, folder, store=store, split="locate")
    other = evaluator(model, folder, store=store, split="locate", batch_size=4)
    no_runs(monkeypatch)
    for score, values in again.measure(strong).scores.items():
        np.testing.assert_array_equal(values, first.scores[score])
    assert again.evaluations["forward"] == len(strong)
    with pytest.raises(AssertionError, match="ran"):  # other batches are another measurement
        other.measure(strong)


def test_a_killed_run_keeps_its_finished_masks(model, folder, strong, tmp_path, monkeypatch):
    store, real, runs = Store(tmp_path / "s.sqlite"), harness._evaluate, []
    theirs = evaluator(model, folder, store=store, split="locate")

    def killed(*args):
        runs.append(args)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(harness, "_evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        theirs.measure(strong)
    theirs.measure(strong)
    assert len(runs) == 4  # two finished, one killed, and that one again


def test_measuring_twice_gives_the_same(model, folder, strong):
    a, b = (evaluator(model, folder, split="verify").measure(strong) for _ in range(2))
    for score in a.scores:
        np.testing.assert_array_equal(a.scores[score], b.scores[score])


def test_a_part_scores_its_items_alone(model, folder, strong):
    whole = evaluator(model, folder, split="verify")
    part = whole.part(np.array([1, 4, 5]))
    found, expected = part.measure(strong), whole.measure(strong)
    np.testing.assert_allclose(
        found.scores["logprob"], expected.scores["logprob"][:, [1, 4, 5]], 1e-4
    )
    assert part.facts.tolist() == whole.facts[[1, 4, 5]].tolist()
    assert (whole.evaluations["forward"], part.evaluations["forward"]) == (3, 3)
    assert part.items == tuple(whole.items[i] for i in (1, 4, 5)) and len(whole.items) == N // 2


def state(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [len(getattr(m, k)) for m in model.hf.modules() for k in kinds]
    weights = {name: p.clone() for name, p in model.hf.state_dict().items()}
    forwards = [m.__dict__.get("forward") for m in model.hf.modules()]
    drawn = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    tokens = (model.tokenizer.padding_side, model.tokenizer.pad_token)
    return hooks, weights, forwards, drawn, tokens, logging.getLogger("lm_eval").level


def same(a, b):
    assert a[0] == b[0] and a[2:] == b[2:]
    for name, weights in a[1].items():
        assert torch.equal(weights, b[1][name])


@pytest.mark.parametrize("name", ["tiny_choice", "tiny_written"])
def test_nothing_of_a_run_stays_on_the_model(model, folder, strong, name, monkeypatch):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)  # not what the harness seeds with
    before = state(model)
    theirs = evaluator(model, folder, name)
    theirs.measure(strong)
    same(before, state(model))

    def fail(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(harness, "_table", fail)
    with pytest.raises(RuntimeError, match="broken"):
        theirs._run(strong[1])
    monkeypatch.undo()
    projection = model.projections[2]._module
    hook = projection.register_forward_pre_hook(fail)
    with pytest.raises(Exception, match="broken"):
        theirs._run(strong[1])
    hook.remove()
    same(before, state(model))
    np.testing.assert_array_equal(theirs._run(strong[0]), theirs._known(strong[0]))


def test_scores_that_are_not_finite_are_not_kept(model, folder, monkeypatch):
    theirs = evaluator(model, folder)
    monkeypatch.setattr(harness, "_logprob", lambda *_: float("nan"))
    with pytest.raises(InputError, match="not finite"):
        theirs.baseline  # noqa: B018
    assert len(theirs.store) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny_choise", "did you mean tiny_choice"),
        ("tiny_unsafe", "runs programs"),
        ("tiny_hub", "code from the hub"),
        ("tiny_lost", "check the network"),
        ("tiny_group", "name one of them, such as tiny_choice"),
    ],
)
def test_tasks_that_cannot_be_used_are_refused(model, folder, name, message, monkeypatch):
    real = harness_tasks._manager

    def local(include_path, name):  # the harness's own index takes too long to read
        return real(include_path, "tiny_choice")

    monkeypatch.setattr(harness_tasks, "_manager", local)
    with pytest.raises(InputError, match=message):
        evaluator(model, folder, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ablation="mean"), "zero ablation"),
        (dict(split="half"), "unknown split"),
        (dict(n_items=N + 1), f"1 to {N}"),
        (dict(n_items=0), "one or more"),
        (dict(batch_size="auto"), "batch_size"),
        (dict(num_fewshot=-1), "num_fewshot"),
        (dict(seed=0.5), "seed"),
    ],
)
def test_bad_options_are_refused(model, folder, options, message):
    with pytest.raises(InputError, match=message):
        evaluator(model, folder, **options)


def test_answers_longer_than_the_context_are_refused(model, folder, tmp_path):
    text = (folder / "written.yaml").read_text()
    (tmp_path / "long.yaml").write_text(text.replace("max_gen_toks: 3", "max_gen_toks: 64"))
    with pytest.raises(InputError, match="64 tokens, but llama reads at most 64"):
        evaluator(model, tmp_path, "tiny_written")


def test_a_missing_package_is_named_with_its_remedy(model, folder, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "lm_eval":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"csloc\[harness\]"):
        evaluator(model, folder)


def test_the_command_line_takes_a_task_of_the_harness(model, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path / "cache"))
    tiny.hf_model("llama").save_pretrained("model")
    model.tokenizer.save_pretrained("model")
    line = (
        f"locate --model model --task lm-eval:tiny_written --include-path {folder} --controls none "
        "--k 1 --dtype float32 --quiet --json out.json --random 2 --seed SEED"
    )
    # A seed whose halves both hold enough of the questions that this model gets right.
    seed = next(
        s
        for s in range(50)
        if min(
            evaluator(model, folder, "tiny_written", split=half, seed=s).baseline["accuracy"].mean()
            for half in ("locate", "verify")
        )
        > 0.4
    )
    line = line.replace("SEED", str(seed))
    assert cli.main([*line.split(), "--method", "screened"]) == 2
    assert "no gradients" in capsys.readouterr().err
    status = cli.main([*line.split(), "--method", "sweep"])
    text = capsys.readouterr()
    assert status == 0, text.err
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["task"]["name"] == "lm-eval:tiny_written" and report["score"] == "accuracy"
    assert report["evaluations"]["equivalents"] == 1 + model.grid.size
    assert report["gate"]["passed"] and report["heads"][0]["head"] in text.out
    assert list(report["verify"]["target"])[3:] == ["accuracy"]
