"""Switching heads off: the right slice, exactly, in every supported architecture."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

import tiny
from csloc_utils.ablation import Ablation, forward, masked_logits
from csloc_utils.errors import InputError
from csloc_utils.generation import generate
from csloc_utils.heads import Head
from csloc_utils.models import HeadModel, find_projections

IDS = torch.tensor([[2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19]])
OFF = [Head(2, 1), Head(0, 3), Head(0, 0)]
ONES = torch.ones_like(IDS)


def masks_for(model, heads=OFF, rows=3):
    return np.repeat(model.grid.mask(heads)[None], rows, axis=0)


def without_columns(name, heads=OFF, attention=None):
    """A copy of the model whose projections have no weights for `heads`."""
    hf = copy.deepcopy(tiny.hf_model(name, attention))
    width = tiny.head_model(name, attention).grid.head_width
    with torch.no_grad():
        for head in heads:
            projection = hf.get_submodule(find_projections(hf)[head.layer])
            columns = slice(head.index * width, (head.index + 1) * width)
            if hasattr(projection, "nf"):  # Conv1D stores its weight transposed
                projection.weight[columns] = 0
            else:
                projection.weight[:, columns] = 0
    return hf


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_equals_zeroing_weight_columns(name):
    """Public reports: interp-reasoning/thought-anchors #7 (post-projection slices called heads)
    and SafetyHeadAttribution #11 (does zeroing matrix entries equal ablating a head?)."""
    model = tiny.head_model(name)
    got = masked_logits(model, IDS, ONES, masks_for(model))
    wanted = without_columns(name)(input_ids=IDS, attention_mask=ONES).logits
    assert torch.equal(got, wanted)
    assert not torch.allclose(got, masked_logits(model, IDS, ONES))


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "llama-mha"])
def test_equals_zeroing_values_after_repeat_kv(name):
    """Public reports: SafetyHeadAttribution #11, and TransformerLens #980, #659, PR #520, #713,
    #810, #1593 (head indexing under grouped-query attention)."""
    model = tiny.head_model(name)
    hf = copy.deepcopy(tiny.hf_model(name))

    def values_off(module, query, key, value, mask, heads=(), **kwargs):
        groups = module.num_key_value_groups
        key, value = repeat_kv(key, groups), repeat_kv(value, groups).clone()
        for head in heads:
            if head.layer == module.layer_idx:
                value[:, head.index] = 0
        plain = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=False)
        return sdpa_attention_forward(plain, query, key, value, mask, **kwargs)

    def logits(heads):
        AttentionInterface.register("values_off", lambda *a, **k: values_off(*a, heads=heads, **k))
        hf.config._attn_implementation = "values_off"
        return hf(input_ids=IDS).logits

    # The repeated values change the shape of one product, so the intact model is compared first.
    assert torch.equal(logits([]), masked_logits(model, IDS, ONES))
    assert torch.equal(logits(OFF), masked_logits(model, IDS, ONES, masks_for(model)))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_slicing_the_projections_output_is_something_else(name):
    """Public reports: interp-reasoning/thought-anchors #7, ndif-team/nnsight #525."""
    model, hf, head = tiny.head_model(name), copy.deepcopy(tiny.hf_model(name)), Head(1, 2)
    columns = slice(head.index * 12, (head.index + 1) * 12)

    def blank(module, args, output):
        output = output.clone()
        output[..., columns] = 0
        return output

    hf.get_submodule(find_projections(hf)[head.layer]).register_forward_hook(blank)
    wrong = hf(input_ids=IDS).logits
    right = masked_logits(model, IDS, ONES, masks_for(model, [head]))
    assert not torch.allclose(wrong, right, atol=1e-2)


def test_order_of_heads_does_not_matter():
    """Public report: ndif-team/nnsight #525 (unsorted heads end in OutOfOrderError)."""
    model = tiny.head_model("llama")
    a, b = (masks_for(model, heads) for heads in (OFF, OFF[::-1]))
    assert torch.equal(masked_logits(model, IDS, ONES, a), masked_logits(model, IDS, ONES, b))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_agree(attention):
    """Public reports: transformers PR #35786, #41076 (head_mask ignored under SDPA), #41620."""
    for name in ("llama", "qwen3", "gpt2", "neox", "opt", "falcon"):
        model, reference = tiny.head_model(name, attention), tiny.head_model(name, "eager")
        masks = masks_for(model)
        got = masked_logits(model, IDS, ONES, masks)
        assert torch.allclose(got, masked_logits(reference, IDS, ONES, masks), atol=1e-4)
        zeroed = without_columns(name, attention=attention)
        wanted = zeroed(input_ids=IDS, attention_mask=ONES).logits
        # GPT-2's eager attention hands over a strided tensor: other kernel, other last digit.
        assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_rows_with_their_own_masks_in_any_order(name):
    model = tiny.head_model(name)
    masks = np.random.default_rng(0).random((3, model.grid.size)) < 0.3
    together = masked_logits(model, IDS, ONES, masks)
    order = [2, 0, 1]
    shuffled = masked_logits(model, IDS[order], ONES, masks[order])
    assert torch.allclose(shuffled, together[order], atol=1e-4)
    for row in range(3):
        alone = masked_logits(model, IDS[[row]], ONES[[row]], masks[[row]])
        assert torch.allclose(alone[0], together[row], atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_padding_changes_nothing(name, side):
    """Public reports: ndif-team/nnsight #672 (left padding gives GPT-2 wrong positions) and
    transformers #47651 (fully masked rows become NaN)."""
    model = tiny.head_model(name)
    masks = masks_for(model, rows=2)
    ids, attention = torch.full((2, 6), 1), torch.zeros(2, 6, dtype=torch.long)
    ids[0], attention[0] = IDS[0], 1
    real = slice(2, 6) if side == "left" else slice(0, 4)
    ids[1, real], attention[1, real] = IDS[1, :4], 1
    padded = masked_logits(model, ids, attention, masks)
    assert torch.isfinite(padded).all()
    alone = masked_logits(model, IDS[1:2, :4], ONES[:1, :4], masks[:1])
    assert torch.allclose(padded[1, real], alone[0], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_left_padded_batches_stay_finite_in_short_dtypes(dtype):
    """Public reports: transformers #47651, unsloth #9708 (NaN in left-padded short-dtype rows)."""
    hf = copy.deepcopy(tiny.hf_model("llama")).to(dtype)
    model = HeadModel(hf, tiny.tokenizer())
    ids = torch.tensor([[1, 1, 1, 2, 3, 4], [2, 3, 4, 5, 6, 7]])
    attention = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    logits = masked_logits(model, ids, attention, masks_for(model, rows=2))
    assert logits.dtype == dtype and torch.isfinite(logits[attention.bool()]).all()


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_head_full_of_inf_is_fully_removed(poison):
    """Public report of the field: inf * 0 is NaN, so multiplying does not remove a head (row 8 of
    the field's cases; the same NaN spread as in transformers #47651)."""
    hf = copy.deepcopy(tiny.hf_model("llama-mha"))
    model = HeadModel(hf, tiny.tokenizer())
    wanted = masked_logits(model, IDS, ONES, masks_for(model, [Head(1, 2)]))
    with torch.no_grad():
        hf.model.layers[1].self_attn.v_proj.weight[2 * 12 : 3 * 12] = poison
    assert not torch.isfinite(masked_logits(model, IDS, ONES)).all()
    got = masked_logits(model, IDS, ONES, masks_for(model, [Head(1, 2)]))
    assert torch.equal(got, wanted)


def test_bias_of_the_projection_survives_when_all_heads_are_off():
    """Public reports: ACDC PR #52 and #82 (zero ablation removed biases too)."""
    model = tiny.head_model("gpt2")
    outputs = []
    projection = model.hf.transformer.h[1].attn.c_proj
    hook = projection.register_forward_hook(lambda m, a, output: outputs.append(output))
    masked_logits(model, IDS, ONES, np.ones((3, model.grid.size), bool))
    hook.remove()
    assert projection.bias.abs().sum() > 0
    assert torch.equal(outputs[0], projection.bias.expand_as(outputs[0]))


def test_padded_ids_without_mask_are_refused():
    """Public report: ndif-team/nnsight #614 (ids without a mask: padding is attended)."""
    model = tiny.head_model("llama")
    with pytest.raises(InputError, match="attention_mask"):
        masked_logits(model, torch.tensor([[1, 1, 2, 3], [2, 3, 4, 5]]))
    full = masked_logits(model, IDS)
    assert torch.equal(full, masked_logits(model, IDS, ONES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_follow_the_activations_device_and_dtype(dtype):
    """Public reports: TransformerLens #439, inseq #276 and #230, captum PR #1895 (masks made on
    the CPU). The second device of a machine without a GPU is torch's ``meta``."""
    from csloc_utils.ablation import _fill

    heads = torch.ones(2, 3, 8, dtype=dtype, device="meta")
    off = torch.zeros(2, 8, dtype=torch.bool)
    for ablation in (Ablation(), Ablation([torch.zeros(8)])):
        filled = _fill(heads, off, ablation, 0)
        assert filled.device.type == "meta" and filled.dtype == dtype


@pytest.mark.parametrize("name", [n for n in tiny.ARCHITECTURES if "llama-" not in n])
def test_cached_prefix_equals_one_forward(name):
    """Public reports: transformers #32929 and #32159, physical-ai-studio PR #239, MemOS #2301
    (a reused cache grows in place). Prefixes here are longer than the sliding windows."""
    model = tiny.head_model(name)
    masks = np.random.default_rng(1).random((2, model.grid.size)) < 0.3
    prefix = torch.arange(2, 14).repeat(2, 1)
    suffix = torch.tensor([[14, 15, 16], [17, 18, 1]])
    attention = torch.ones(2, 15, dtype=torch.long)
    attention[1, -1] = 0
    whole = masked_logits(model, torch.cat([prefix, suffix], 1), attention, masks)
    run = forward(model, prefix, torch.ones_like(prefix), masks, keep_cache=True)
    cache = copy.deepcopy(run.cache)
    cached = forward(model, suffix, attention, masks, cache=cache).logits
    real = attention[:, 12:].bool()
    assert torch.allclose(cached[real], whole[:, 12:][real], atol=1e-4)
    assert run.cache.get_seq_length() == 12  # the copy grew, the original did not


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_scored_positions_only(name):
    model = tiny.head_model(name)
    places = torch.tensor([[1, 4], [0, 5], [3, 3]])
    whole = masked_logits(model, IDS, ONES, masks_for(model))
    some = masked_logits(model, IDS, ONES, masks_for(model), positions=places)
    assert torch.allclose(some, whole[torch.arange(3)[:, None], places], atol=1e-5)


def test_mean_and_donor_values_replace_only_masked_heads():
    model = tiny.head_model("llama")
    clean = forward(model, IDS, ONES, keep_values=True)
    own = Ablation(clean.head_values)
    masks = masks_for(model)
    # Replaced by what they are, heads change nothing; by another row's values, they do.
    assert torch.allclose(masked_logits(model, IDS, ONES, masks, own), clean.logits, atol=1e-5)
    other = Ablation([layer[[1, 2, 0]] for layer in clean.head_values])
    assert not torch.allclose(masked_logits(model, IDS, ONES, masks, other), clean.logits)
    none = masks_for(model, [])
    assert torch.equal(masked_logits(model, IDS, ONES, none, other), clean.logits)


def test_model_is_untouched_afterwards():
    hf = copy.deepcopy(tiny.hf_model("llama"))
    before = {k: v.clone() for k, v in hf.state_dict().items()}
    wanted = hf(input_ids=IDS).logits
    model = HeadModel(hf, tiny.tokenizer())
    masked_logits(model, IDS, ONES, masks_for(model))
    generate(model, ["1 2 3"], model.grid.mask(OFF), max_new_tokens=2, progress=False)
    assert all(torch.equal(v, before[k]) for k, v in hf.state_dict().items())
    assert torch.equal(hf(input_ids=IDS).logits, wanted)
    assert torch.equal(masked_logits(model, IDS, ONES), wanted)


def test_wrong_number_of_masks():
    model = tiny.head_model("llama")
    with pytest.raises(InputError, match="2 masks for 3 rows"):
        masked_logits(model, IDS, ONES, masks_for(model, rows=2))
