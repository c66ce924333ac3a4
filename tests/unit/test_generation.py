"""Batched greedy decoding: every row as if it were decoded alone, whatever shares its batch."""

import copy
import functools

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from csloc_utils import decoding, rows, shared_prefix
from csloc_utils.ablation import Ablation, masked_logits
from csloc_utils.errors import InputError
from csloc_utils.generation import chat_prompt, generate
from csloc_utils.models import HeadModel, find_projections

NAMES = ["llama", "gpt2", "qwen3", "gemma3"]
MORE = ["mistral", "gemma2", "opt", "falcon"]
FEW_SHOT = [2, 9, 14, 5, 16, 3, 8, 21, 4, 11]
PROMPTS = [[*FEW_SHOT, *own] for own in ([7], [6, 12, 18, 2, 13], [19, 20, 4], [6, 12, 15])]
TOKENS = 8


@functools.cache
def lively_hf(name):
    """A random model whose text does not fall into a rut, so that every mask and place shows."""
    hf = copy.deepcopy(tiny.hf_model(name))
    torch.manual_seed(2)
    with torch.no_grad():
        for key, parameter in hf.named_parameters():
            if parameter.ndim == 1:  # layers that read everything and shift nothing
                parameter.fill_(float(key.endswith("weight") and "gemma" not in name))
        head = hf.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight))  # not the input's own
        for path in find_projections(hf):
            hf.get_submodule(path).weight.mul_(4)
    return hf


@functools.cache
def lively(name):
    return HeadModel(copy.deepcopy(lively_hf(name)), tiny.tokenizer(), name)


def without_columns(name, mask):
    """A copy of the model whose projections have no weights for masked heads."""
    hf, grid = copy.deepcopy(lively_hf(name)), lively(name).grid
    off = torch.from_numpy(mask).view(grid.shape).repeat_interleave(grid.head_width, 1)
    with torch.no_grad():
        for path, columns in zip(find_projections(hf), off):
            projection = hf.get_submodule(path)
            # Conv1D stores its weight transposed.
            (projection.weight if hasattr(projection, "nf") else projection.weight.T)[columns] = 0
    return hf


def some_masks(model, n=3):
    masks = np.random.default_rng(3).random((n, model.grid.size)) < 0.3
    masks[1] = False
    return masks


def alone(model, masks, prompts=PROMPTS, n=TOKENS, ablation=None, ends=()):
    """No cache and no padding: for every token the whole text anew, [mask][item]."""
    table = []
    for prompt in prompts:
        ids = torch.tensor([prompt] * len(masks))
        for _ in range(n):
            last = torch.full((len(masks), 1), ids.shape[1] - 1)
            ones = torch.ones_like(ids)
            logits = masked_logits(model, ids, ones, masks, ablation, last)
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        news = ids[:, len(prompt) :].tolist()
        cuts = [next((i for i, t in enumerate(new) if t in ends), n) + 1 for new in news]
        table.append([new[:cut] for new, cut in zip(news, cuts)])
    return [list(row) for row in zip(*table)]


def rare(name):
    """Tokens that some rows write and others do not, rarest first."""
    rows = [set(new[:-2]) for part in _alone(name) for new in part]
    count = {token: sum(token in row for row in rows) for token in sorted(set.union(*rows))}
    ends = set()
    for token in sorted(count, key=count.get):
        if sum(bool(row & (ends | {token})) for row in rows) <= len(rows) / 2:
            ends.add(token)
    return ends


def with_ends(name, ends):
    hf = copy.deepcopy(lively_hf(name))
    hf.generation_config.eos_token_id = list(ends)
    return HeadModel(hf, tiny.tokenizer(), name)


@pytest.fixture(params=[5, None])
def batch_rows(request):
    return request.param


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_by_one_decoding_without_cache(name, batch_rows):
    model = lively(name)
    masks = some_masks(model)
    got = generate(model, PROMPTS, masks, max_new_tokens=TOKENS, batch_rows=batch_rows)
    assert got.ids == _alone(name)
    assert {e for part in got.endings for e in part} == {"length"}
    assert got.batch_rows == (batch_rows or masks.shape[0] * len(PROMPTS))


_known = {}


def _alone(name):
    if name not in _known:
        model = lively(name)
        _known[name] = alone(model, some_masks(model))
    return _known[name]


@pytest.mark.parametrize("name", MORE)
def test_other_architectures(name):
    model = lively(name)
    masks = some_masks(model, 2)
    got = generate(model, PROMPTS, masks, max_new_tokens=4, batch_rows=3)
    assert got.ids == alone(model, masks, n=4)


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers_with_the_heads_weights_zeroed(name):
    model = lively(name)
    masks = some_masks(model, 3)
    ends = rare(name)
    ended = with_ends(name, ends)
    got = generate(ended, PROMPTS, masks, max_new_tokens=TOKENS, batch_rows=5)
    for mask, row in zip(masks, got.ids):
        hf = without_columns(name, mask)
        hf.generation_config.eos_token_id = list(ends)
        for prompt, new in zip(PROMPTS, row):
            ids = torch.tensor([prompt])
            options = dict(do_sample=False, max_new_tokens=TOKENS, pad_token_id=1)
            wanted = hf.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert new == wanted[0, len(prompt) :].tolist()
    lengths = {len(new) for row in got.ids for new in row}
    assert len(lengths) > 1  # some rows did end early


@pytest.mark.parametrize("name", ["llama"])
def test_early_ends_are_retired_and_noted(name):
    ends = rare(name)
    model = with_ends(name, ends)
    masks = some_masks(model)
    for batch_rows in (2,):
        got = generate(model, PROMPTS, masks, max_new_tokens=TOKENS, batch_rows=batch_rows)
        wanted = alone(model, masks, ends=ends)
        assert got.ids == wanted
        assert got.endings == [
            ["eos" if new[-1] in ends else "length" for new in row] for row in wanted
        ]


def test_ended_rows_are_not_run_on(monkeypatch):
    model = with_ends("llama", rare("llama"))
    sizes = []
    real = decoding.forward

    def counted(model, ids, *args, **kwargs):
        sizes.append(tuple(ids.shape))
        return real(model, ids, *args, **kwargs)

    monkeypatch.setattr(decoding, "forward", counted)
    got = generate(model, PROMPTS, some_masks(model), max_new_tokens=TOKENS, batch_rows=64)
    steps = [rows for rows, tokens in sizes if tokens == 1]
    assert sum(steps) == sum(len(new) - 1 for row in got.ids for new in row)
    assert sizes[0] == (3, len(FEW_SHOT))  # the prefix: once a mask, not once a row


@pytest.mark.parametrize("name", NAMES)
def test_mean_ablation(name):
    model = lively(name)
    generator = torch.Generator().manual_seed(1)
    width = model.grid.n_heads * model.grid.head_width
    values = [torch.randn(width, generator=generator) for _ in range(model.grid.n_layers)]
    ablation, masks = Ablation(values), some_masks(model, 2)
    got = generate(model, PROMPTS, masks, ablation=ablation, max_new_tokens=4, batch_rows=3)
    wanted = alone(model, masks, n=4, ablation=ablation)
    assert got.ids == wanted
    assert got.ids != generate(model, PROMPTS, masks, max_new_tokens=4).ids


def test_long_runs_outlast_the_reserved_columns():
    """Rows keep coming, so the columns are used up again and again."""
    model = lively("llama")
    masks = some_masks(model, 4)
    prompts = [[*FEW_SHOT, 5 + i] for i in range(3)]
    prompts[2] += [3, 4, 5, 6, 7]
    for shared, batch_rows in ((True, 2), (False, 2), (True, 1)):
        model._shares_prefix = shared
        try:
            got = generate(model, prompts, masks, max_new_tokens=3, batch_rows=batch_rows)
        finally:
            del model._shares_prefix
        assert got.ids == alone(model, masks, prompts, n=3)


@pytest.mark.parametrize("prompts", [[[5, 6, 7]], [[5], [6, 7]], [PROMPTS[0], PROMPTS[0]]])
def test_prompts_without_a_prefix_and_twice_the_same(prompts):
    model = lively("llama")
    masks = some_masks(model, 2)
    got = generate(model, prompts, masks, max_new_tokens=5, batch_rows=3)
    assert got.ids == alone(model, masks, prompts, n=5)


def test_which_models_share_the_prefix():
    shares = {name for name in NAMES + MORE if shared_prefix.can_share(lively(name), 5)}
    # Falcon has attention code of its own; with the others it can be replaced.
    assert shares == {*NAMES, *MORE} - {"falcon"}
    assert not shared_prefix.can_share(lively("gemma3"), 30)  # its window is 6 tokens


def test_the_models_own_attention_is_back_afterwards():
    model = lively("llama")
    before = model.hf.config._attn_implementation
    generate(model, PROMPTS, some_masks(model), max_new_tokens=2)
    assert model.hf.config._attn_implementation == before
    assert model.hf.config._attn_implementation in ("sdpa", "eager")


def test_out_of_memory_halves_the_rows_and_loses_nothing(monkeypatch):
    model, masks = lively("llama"), some_masks(lively("llama"))
    real, calls = decoding.forward, []

    def tight(model, ids, *args, **kwargs):
        calls.append(len(ids))
        if len(ids) > 4 and len(calls) > 6:
            raise torch.OutOfMemoryError("out of memory")
        return real(model, ids, *args, **kwargs)

    monkeypatch.setattr(decoding, "forward", tight)
    got = generate(model, PROMPTS, masks, max_new_tokens=TOKENS, batch_rows=12)
    assert got.ids == _alone("llama")
    assert got.batch_rows == 3 and max(calls) == 12

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(decoding, "forward", full)
    with pytest.raises(InputError, match="single text does not fit"):
        generate(model, PROMPTS, masks, max_new_tokens=2)


def test_other_errors_are_not_taken_for_memory(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(decoding, "forward", broken)
    model = lively("llama")
    with pytest.raises(RuntimeError, match="shape mismatch"):
        generate(model, PROMPTS, some_masks(model), max_new_tokens=2)


def test_logits_that_are_not_finite_name_the_dtype():
    hf = copy.deepcopy(tiny.hf_model("llama")).bfloat16()
    model = HeadModel(hf, tiny.tokenizer(), "damaged")
    with torch.no_grad():
        hf.model.layers[1].mlp.down_proj.weight[0] = float("nan")
    with pytest.raises(InputError, match="bfloat16.*float32"):
        generate(model, PROMPTS, some_masks(model), max_new_tokens=2)


def test_stop_strings_end_rows_and_are_cut_off():
    model = lively("llama")
    masks = some_masks(model)
    free = generate(model, PROMPTS, masks, max_new_tokens=TOKENS)
    words = free.texts[0][1].split()
    stop = [" ".join(words[3:5]), words[6]]
    got = generate(model, PROMPTS, masks, max_new_tokens=TOKENS, stop=stop, batch_rows=3)
    assert got.endings[0][1] == "stop"
    for m in range(len(masks)):
        for i in range(len(PROMPTS)):
            text, ids = free.texts[m][i], free.ids[m][i]
            found = [text.find(s) for s in stop if s in text]
            cut = min(found) if found else len(text)
            assert got.texts[m][i] == text[:cut]
            assert got.endings[m][i] == ("stop" if found else "length")
            written = got.ids[m][i]
            assert written == ids[: len(written)]
            if found:  # not one token more than it takes
                whole = [model.tokenizer.decode(written[:n]) for n in (-1, len(written))]
                assert not any(s in whole[0] for s in stop)
                assert any(s in whole[1] for s in stop)


def test_texts_are_the_ids():
    model = lively("llama")
    got = generate(model, PROMPTS, some_masks(model), max_new_tokens=4)
    decoded = [[model.tokenizer.decode(i, skip_special_tokens=True) for i in r] for r in got.ids]
    assert got.texts == decoded


@pytest.mark.parametrize(
    "prompts, options, told",
    [
        ([], {}, "one or more prompts"),
        ([[2], []], {}, "prompt 1 is empty"),
        ([[2], [99]], {}, "prompt 1 holds ids outside"),
        ([[2] * 60], {}, "shorten the prompt"),
        ([[2]], dict(max_new_tokens=0), "max_new_tokens"),
        ([[2]], dict(stop="x"), "list of strings"),
        ([[2]], dict(stop=[""]), "none of them empty"),
        ([[2]], dict(batch_rows=0), "batch_rows"),
        ([[2]], dict(ablation=Ablation([torch.zeros(1, 3, 48)] * 3)), "zero or mean"),
    ],
)
def test_bad_input_is_refused(prompts, options, told):
    model = lively("llama")
    with pytest.raises(InputError, match=told):
        generate(model, prompts, some_masks(model), **{"max_new_tokens": 8, **options})


def bos_tokenizer(template=None):
    from tokenizers.processors import TemplateProcessing

    words = {w: i for i, w in enumerate(["<s>", "</s>", "<unk>", "user", "a", "b"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made


def test_exactly_one_start_token():
    plain = bos_tokenizer()
    assert chat_prompt(plain, "a b") == [0, 4, 5]
    assert chat_prompt(plain, "<s> a b") == [0, 4, 5]
    chat = bos_tokenizer("{{ bos_token }} {{ messages[0]['role'] }} {{ messages[0]['content'] }}")
    assert chat_prompt(chat, "a b") == [0, 3, 4, 5]
    assert chat_prompt(tiny.tokenizer(), "a b") == tiny.tokenizer()("a b").input_ids


def test_a_prompt_with_two_start_tokens_is_refused():
    model = HeadModel(copy.deepcopy(tiny.hf_model("llama")), bos_tokenizer(), "llama")
    with pytest.raises(InputError, match="start token twice"):
        generate(model, [[0, 0, 4]], some_masks(model), max_new_tokens=2)


def test_row_tables_hold_what_was_written():
    """Adding, stepping, removing and moving rows against plain lists."""
    rng = np.random.default_rng(0)
    table = rows.RowTable(1, rows=3, columns=9, begin=4)
    texts, longest = [], 7

    class Given:
        pass

    for _ in range(200):
        ended = [i for i, text in enumerate(texts) if len(text) == longest or rng.random() < 0.1]
        for place in reversed(ended):
            table.remove(place)
            texts[place] = texts[-1]
            texts.pop()
        if len(texts) < 3 and (not texts or rng.random() < 0.5):
            new = rng.integers(1, 99, rng.integers(1, 5)).tolist()
            layer = Given()
            layer.keys = torch.tensor([99.0, *new, 77.0])[None, None, :, None]
            layer.values = -layer.keys
            table.add([layer], 1, [len(new)])
            texts.append(new)
        mask = table.attention_mask().bool()
        fresh = torch.from_numpy(rng.integers(1, 99, len(texts))).float()[:, None, None, None]
        keys, values = table.cache.update(fresh, -fresh, 0)
        texts = [text + [int(x)] for text, x in zip(texts, fresh.flatten())]
        for row, text in enumerate(texts):
            assert keys[row, 0, mask[row], 0].tolist() == text
            assert values[row, 0, mask[row], 0].tolist() == [-x for x in text]
        table.advance()
