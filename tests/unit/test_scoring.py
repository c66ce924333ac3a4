"""From items to tokens and from logits to scores."""

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tiny
from csloc_utils.ablation import masked_logits
from csloc_utils.errors import InputError
from csloc_utils.scoring import combine, encode, probe_logits
from csloc_utils.tasks import Item, Task

FILLER = Item("9 9 9 =", ("9",), fact="filler")


def task(*items, scoring="continuation", prefix=""):
    filler = FILLER if not items[0].choices else Item("9 9 =", (), ("8", "9"), 1, fact="filler")
    return Task("t", "c", scoring, prefix, tuple(items), (filler,), 0)


def scores(model, a_task):
    """Score a task's locate items through `encode`, `probe_logits` and `combine`."""
    encoded = encode(a_task, a_task.locate, model.tokenizer)
    ids, attention = encoded.suffixes()
    whole = torch.tensor([row + [1] * (attention.shape[1] - len(row)) for row in encoded.rows])
    logits = masked_logits(model, whole, attention, positions=torch.from_numpy(encoded.positions))
    return {k: v[0] for k, v in combine(encoded, *probe_logits(encoded, logits)).items()}


def one_by_one(model, text, n_answer):
    """Log-probability of the last `n_answer` tokens and whether greedy decoding writes them."""
    ids = model.tokenizer(text, return_tensors="pt").input_ids
    logprobs = model.hf(ids).logits[0].log_softmax(-1)
    places = range(ids.shape[1] - n_answer, ids.shape[1])
    total = sum(logprobs[p - 1, ids[0, p]].item() for p in places)
    return total, all(int(logprobs[p - 1].argmax()) == int(ids[0, p]) for p in places)


@pytest.fixture(scope="module")
def model():
    return tiny.head_model("llama")


def test_continuation_equals_scoring_one_text_at_a_time(model):
    a_task = task(
        Item("1 2 3 =", ("4 5",)), Item("5 =", ("7",)), Item("a b c d =", ("e f A",)), prefix="0 "
    )
    got = scores(model, a_task)
    for i, item in enumerate(a_task.locate):
        text = a_task.join(item, item.answers[0])
        logprob, greedy = one_by_one(model, text, len(item.answers[0].split()))
        assert got["logprob"][i] == pytest.approx(logprob, abs=1e-4)
        assert got["accuracy"][i] == greedy


def test_greedy_answer_is_accurate_and_several_answers_add_up(model):
    ids = model.tokenizer("1 2 =", return_tensors="pt").input_ids
    best = model.tokenizer.decode(model.hf(ids).logits[0, -1].argmax())
    other = next(w for w in "A B C" if w not in (" ", best))
    got = scores(model, task(Item("1 2 =", (other, best)), Item("1 2 + =", (other,))))
    parts = [one_by_one(model, f"1 2 = {w}", 1)[0] for w in (other, best)]
    assert got["logprob"][0] == pytest.approx(np.logaddexp(*parts), abs=1e-5)
    assert got["accuracy"][0] == 1


def test_answer_that_begins_another_is_not_counted_twice(model):
    short, both = (scores(model, task(Item("1 =", a)))["logprob"] for a in (("2",), ("2", "2 3")))
    assert both == pytest.approx(short, abs=1e-6)


def test_single_token_choices_share_a_row_and_equal_full_scoring(model):
    """Public reports: lm-evaluation-harness #614, PR #531, #1053, #1875, hendrycks/test PR #13
    (the token that is scored is not the token that is written)."""
    letters = Item("1 2 Answer:", (), ("A", "B", "C", "D"), 2)
    a_task = task(letters, scoring="choice")
    encoded = encode(a_task, a_task.locate, model.tokenizer)
    assert len(encoded.rows) == 1 and len(encoded.probes) == 4
    totals = np.array([one_by_one(model, f"1 2 Answer: {c}", 1)[0] for c in "ABCD"])
    got = scores(model, a_task)
    assert got["logprob"][0] == pytest.approx(totals[2] - np.logaddexp.reduce(totals), abs=1e-4)
    assert got["accuracy"][0] == (totals.argmax() == 2)


def test_long_choices_by_total_and_by_length(model):
    choices = ("1", "2 3 4 5", "6 7")
    a_task = task(Item("a =", (), choices, 1), scoring="choice")
    totals = np.array([one_by_one(model, f"a = {c}", len(c.split()))[0] for c in choices])
    norm = totals / [len(c) for c in choices]
    got = scores(model, a_task)
    assert got["accuracy"][0] == (totals.argmax() == 1)
    assert got["accuracy_norm"][0] == (norm.argmax() == 1)
    assert got["logprob_norm"][0] == pytest.approx(norm[1] - np.logaddexp.reduce(norm), abs=1e-4)


def test_text_is_scored_per_token(model):
    a_task = task(Item("1 2", ("3 4 5 6",)), Item("a", ("b c",)), scoring="text")
    got = scores(model, a_task)
    logprob, _ = one_by_one(model, "1 2 3 4 5 6", 4)
    assert got["logprob"][0] == pytest.approx(logprob / 4, abs=1e-4)
    assert got["accuracy"][0] * 4 == int(got["accuracy"][0] * 4)


def test_shared_prefix_is_the_longest_common_run_of_tokens(model):
    a_task = task(Item("1 2 =", ("3",)), Item("1 4 =", ("5",)), prefix="a b c\n")
    encoded = encode(a_task, a_task.locate, model.tokenizer)
    assert encoded.prefix == 4  # a b c 1
    lone = encode(a_task, a_task.locate[:1], model.tokenizer)
    assert lone.prefix == len(lone.rows[0]) - 1  # the scored position is never in the prefix


def merging_tokenizer():
    """Byte-pair tokens that merge ``:`` and `` A`` across the border of prompt and answer."""
    vocabulary = {w: i for i, w in enumerate(["?", "x", ":", "Ġ", "A", "B", "ĠA", "ĠB", ":ĠA"])}
    merges = [("Ġ", "A"), ("Ġ", "B"), (":", "ĠA")]
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


def test_tokens_are_those_of_the_joined_text():
    """Public report: lm-evaluation-harness #1875 (``": C"`` as one token leaves an empty
    continuation)."""
    tokenizer = merging_tokenizer()
    a_task = task(Item("x:", (), ("A", "B"), 0), scoring="choice")
    encoded = encode(a_task, a_task.locate, tokenizer)
    written = [tokenizer.convert_ids_to_tokens(int(t)) for t in encoded.probes[:, 2]]
    assert written == [":ĠA", "ĠB"]


@pytest.mark.parametrize(
    ("items", "scoring", "message"),
    [
        ([Item("1 =", ("?",))], "continuation", None),
        ([Item("1 =", (), ("§", "¤"), 0)], "choice", "same tokens"),
    ],
)
def test_choices_that_collide_in_tokens(model, items, scoring, message):
    if message is None:
        encode(task(*items, scoring=scoring), items, model.tokenizer)
        return
    with pytest.raises(InputError, match=message):
        encode(task(*items, scoring=scoring), items, model.tokenizer)


def test_answer_that_vanishes_names_file_and_line(model):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "1": 1, "=": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("~", "removed")]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    item = Item("1 =", ("~",), where="my.jsonl:3")
    with pytest.raises(InputError, match=r"my.jsonl:3: answer '~' adds no token"):
        encode(task(item), [item], tokenizer)


def test_prompt_longer_than_the_context(model):
    item = Item("1 " * 70 + "=", ("2",))
    with pytest.raises(InputError, match="72 tokens .* at most 64"):
        encode(task(item), [item], model.tokenizer, model.max_length)


def test_exactly_one_bos_and_no_eos():
    """Public report: lm-evaluation-harness PR #2797 (double or missing BOS)."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    a_task = task(Item("1 2 =", ("3 4",)))
    encoded = encode(a_task, a_task.locate, tokenizer)
    assert [row.count(bos) for row in encoded.rows] == [1]
    assert eos not in encoded.probes[:, 2] and len(encoded.probes) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_batches_that_are_not_finite_are_refused(model, bad):
    """Public reports: transformers #47651, unsloth #9708 (NaN rows decode to nothing)."""
    a_task = task(Item("1 2 =", ("3",)))
    encoded = encode(a_task, a_task.locate, model.tokenizer)
    logits = torch.zeros(1, 1, len(tiny.WORDS))
    logits[0, 0, 5] = bad
    with pytest.raises(InputError, match="not finite"):
        probe_logits(encoded, logits)


def test_fingerprint_depends_on_tokens_and_scoring(model):
    a, b = (task(Item("1 2 =", (x,))) for x in ("3", "4"))
    prints = {encode(t, t.locate, model.tokenizer).fingerprint for t in (a, b, a)}
    assert len(prints) == 2
