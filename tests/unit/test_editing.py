"""Edited checkpoints: what is written down is what ablation does, and nothing else changes."""

import json
import re
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers

import shown
import tiny
from csloc_utils import cli, editing, folders, models
from csloc_utils.ablation import Ablation, masked_logits
from csloc_utils.editing import edit_weights, plan_edit, save_edited
from csloc_utils.errors import InputError
from csloc_utils.heads import Head
from csloc_utils.models import HeadModel, find_projections
from csloc_utils.references import token_means

IDS = torch.tensor([[2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19]])
ONES = torch.ones_like(IDS)
OFF = [Head(2, 1), Head(0, 3), Head(0, 0)]
BIASED = ["llama-biased", "gpt2", "neox", "opt", "starcoder2"]


def logits(hf):
    with torch.no_grad():
        return hf(input_ids=IDS, attention_mask=ONES).logits


def masked(model, ablation=None, heads=OFF):
    masks = np.repeat(model.grid.mask(heads)[None], len(IDS), axis=0)
    return masked_logits(model, IDS, ONES, masks, ablation)


def reload(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def means_of(model):
    """Constants of the size of what the heads write."""
    seed = torch.Generator().manual_seed(0)
    width = model.grid.n_heads * model.grid.head_width
    return [torch.randn(width, generator=seed) for _ in range(model.grid.n_layers)]


def columns(hf, head, width):
    projection = hf.get_submodule(find_projections(hf)[head.layer])
    weight = projection.weight if hasattr(projection, "nf") else projection.weight.T
    return weight[head.index * width : (head.index + 1) * width]


@pytest.fixture(scope="module")
def llama():
    return tiny.head_model("llama")


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_reloaded_checkpoint_is_the_ablated_model(name, tmp_path):
    """Exactly, for zero: at equal shapes a zero in the weights is a zero in the heads."""
    model = tiny.head_model(name)
    before = {key: value.clone() for key, value in model.hf.state_dict().items()}
    folder = save_edited(model, OFF, tmp_path / "edited")
    again = reload(folder)
    assert torch.equal(logits(again), masked(model))
    assert not torch.allclose(logits(again), logits(model.hf), atol=1e-2)

    after, saved = model.hf.state_dict(), again.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    changed = {key for key, value in before.items() if not torch.equal(saved[key], value)}
    paths = find_projections(model.hf)
    assert changed == {f"{paths[layer]}.weight" for layer in (0, 2)}
    tied = model.hf.get_output_embeddings().weight is model.hf.get_input_embeddings().weight
    assert tied == (again.get_output_embeddings().weight is again.get_input_embeddings().weight)
    words = transformers.PreTrainedTokenizerFast.from_pretrained(folder)("1 + 2 =").input_ids
    assert words == model.tokenizer("1 + 2 =").input_ids


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_scale_is_a_weaker_or_stronger_head(name, tmp_path):
    model = tiny.head_model(name)
    width = model.grid.head_width
    again = reload(save_edited(model, OFF, tmp_path / "edited", scale=1.5))
    for head in model.grid.heads:
        factor = 1.5 if head in OFF else 1.0
        old = columns(model.hf, head, width)
        assert torch.equal(columns(again, head, width), old * factor)

    def stronger(module, args, layer):
        heads = args[0].clone()
        for head in (head for head in OFF if head.layer == layer):
            heads[..., head.index * width : (head.index + 1) * width] *= 1.5
        return (heads,)

    hooks = [
        model.hf.get_submodule(path).register_forward_pre_hook(
            lambda module, args, layer=layer: stronger(module, args, layer)
        )
        for layer, path in enumerate(find_projections(model.hf))
    ]
    wanted = logits(model.hf)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(logits(again), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(wanted, logits(model.hf), atol=1e-2)


@pytest.mark.parametrize("name", BIASED)
def test_means_go_into_the_bias(name, tmp_path):
    model = tiny.head_model(name)
    means = means_of(model)
    wanted = masked(model, Ablation(means))
    again = reload(save_edited(model, OFF, tmp_path / "edited", means=means))
    torch.testing.assert_close(logits(again), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(wanted, masked(model), atol=1e-2)
    paths, saved = find_projections(model.hf), again.state_dict()
    changed = {k for k, v in model.hf.state_dict().items() if not torch.equal(saved[k], v)}
    assert changed == {f"{paths[i]}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}


@pytest.mark.parametrize("name", [name for name in tiny.ARCHITECTURES if name not in BIASED])
def test_no_bias_no_mean(name, tmp_path):
    model = tiny.head_model(name)
    with pytest.raises(InputError, match="no bias at .*: use zero ablation, or a model with"):
        save_edited(model, OFF, tmp_path / "edited", means=means_of(model))
    assert not any(tmp_path.iterdir())
    with pytest.raises(InputError, match="no bias"):
        plan_edit(model.hf.config, "L0H0", mean=True)


def test_the_dtype_is_kept(tmp_path):
    model = HeadModel(tiny.hf_model("gpt2").bfloat16(), tiny.tokenizer(), "half")
    try:
        again = reload(save_edited(model, OFF, tmp_path / "edited", means=means_of(model)))
        assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
        assert plan_edit(again.config, OFF).dtype == "bfloat16"
    finally:
        tiny.hf_model.cache_clear()


def test_weights_in_files_of_limited_size(llama, tmp_path):
    folder = save_edited(llama, OFF, tmp_path / "edited", max_shard_size="30KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(logits(reload(folder)), masked(llama))


def test_the_size_is_told_before(llama, tmp_path):
    folder = save_edited(llama, OFF, tmp_path / "edited")
    written = (folder / "model.safetensors").stat().st_size
    plan = plan_edit(llama.hf.config, "L2H1,L0H3,L0H0", dtype="float32")
    assert 0 <= written - plan.n_bytes < 10_000  # the header
    assert plan.heads == OFF
    assert [c.heads for c in plan.changes] == [(Head(0, 3), Head(0, 0)), (Head(2, 1),)]
    assert plan.changes[0].columns == (*range(12), *range(36, 48))
    assert plan_edit(llama.hf.config, OFF, dtype="bfloat16").n_bytes == plan.n_bytes / 2


def test_edits_end_with_the_block_whatever_ends_it():
    model = tiny.head_model("gpt2")
    before, fingerprint = logits(model.hf), model.fingerprint
    means = means_of(model)
    with pytest.raises(KeyboardInterrupt), edit_weights(model, OFF, means=means) as edited:
        assert edited is model
        assert model.fingerprint["weights"] != fingerprint["weights"]
        with edit_weights(model, "L0H1,L1H1", 2.0):  # edits nest
            pass
        torch.testing.assert_close(logits(model.hf), masked(model, Ablation(means)))
        raise KeyboardInterrupt
    assert torch.equal(logits(model.hf), before)
    assert model.fingerprint == fingerprint
    del model.__dict__["fingerprint"]  # as if it had not been asked for yet
    with edit_weights(model, OFF):
        assert model.fingerprint["weights"] != fingerprint["weights"]
    assert model.fingerprint == fingerprint


def test_an_error_in_the_middle_of_an_edit_undoes_it(monkeypatch):
    model = tiny.head_model("gpt2")
    before, calls = logits(model.hf), []
    by_inputs = editing._by_inputs

    def fails_at_the_second(projection):
        calls.append(projection)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return by_inputs(projection)

    monkeypatch.setattr(editing, "_by_inputs", fails_at_the_second)
    with pytest.raises(RuntimeError), edit_weights(model, OFF):
        pass
    assert len(calls) == 2 and torch.equal(logits(model.hf), before)


def test_weights_that_are_not_finite_are_zeroed(llama):
    with edit_weights(llama, "L0H0"), torch.no_grad():
        columns(llama.hf, Head(0, 0), 12)[:] = torch.inf  # undone with the block
        with edit_weights(llama, "L0H0"):
            assert logits(llama.hf).isfinite().all()


@pytest.mark.parametrize("error", [RuntimeError("torn"), KeyboardInterrupt(), OSError("disk full")])
def test_an_interrupted_run_leaves_nothing(llama, tmp_path, monkeypatch, error):
    def half(hf, folder, **options):
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    before = logits(llama.hf)
    monkeypatch.setattr(type(llama.hf), "save_pretrained", half)
    wanted = InputError if isinstance(error, OSError) else type(error)
    with pytest.raises(wanted):
        save_edited(llama, OFF, tmp_path / "edited")
    assert not any(tmp_path.iterdir())
    assert torch.equal(logits(llama.hf), before)


def test_a_killed_run_has_not_taken_the_name(llama, tmp_path, monkeypatch):
    save = type(llama.hf).save_pretrained

    def watched(hf, folder, **options):
        save(hf, folder, **options)
        assert not (tmp_path / "edited").exists()

    monkeypatch.setattr(type(llama.hf), "save_pretrained", watched)
    save_edited(llama, OFF, tmp_path / "edited")
    assert [path.name for path in tmp_path.iterdir()] == ["edited"]


def test_nothing_is_overwritten(llama, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    for name, message in (("full", "not empty"), ("file", "a file"), ("no/where", "no folder")):
        with pytest.raises(InputError, match=message):
            save_edited(llama, OFF, tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert (save_edited(llama, OFF, tmp_path / "empty") / "config.json").is_file()
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
    with pytest.raises(InputError, match="make room"):
        save_edited(llama, OFF, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_filled_meanwhile_is_left_alone(llama, tmp_path, monkeypatch):
    def meanwhile(*_, **__):
        (tmp_path / "edited").mkdir()
        (tmp_path / "edited" / "theirs").touch()

    monkeypatch.setattr(type(llama.hf), "save_pretrained", meanwhile)
    with pytest.raises(InputError, match="cannot write"):
        save_edited(llama, OFF, tmp_path / "edited")
    assert [path.name for path in (tmp_path / "edited").iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(heads="L0H0,L0H0"), "twice"),
        (dict(heads="L3H0"), "layers 0 … 2"),
        (dict(heads=[]), "no head"),
        (dict(scale=-1), "scale is -1"),
        (dict(scale=float("inf")), "scale is inf"),
        (dict(scale="much"), "scale is 'much'"),
        (dict(scale=0.5, means=[]), "either scaled"),
        (dict(means=[torch.zeros(48)] * 2), "3 tensors of 48"),
        (dict(means=[torch.full((48,), torch.nan)] * 3), "not finite"),
        (dict(max_shard_size="big"), "no file size"),
        (dict(max_shard_size=0), "no file size"),
    ],
)
def test_bad_edits(llama, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        save_edited(llama, **{"heads": OFF, "out": tmp_path / "edited", **options})
    assert not any(tmp_path.iterdir())


def test_quantized_and_absent_weights_are_refused(llama):
    config = transformers.LlamaConfig(**llama.hf.config.to_dict())
    config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(InputError, match="quantized"):
        plan_edit(config, "L0H0")
    away = tiny.head_model("llama-mha")
    projection = away.hf.get_submodule(find_projections(away.hf)[0])
    weight = projection.weight
    projection.weight = torch.nn.Parameter(weight.to("meta"))
    with pytest.raises(InputError, match="outside the memory"), edit_weights(away, "L0H0"):
        pass
    projection.weight = weight


def card_of(folder):
    """The model card, its front matter read as the hub reads it."""
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    return card.data.to_dict(), card.text


def test_the_card_without_evidence(llama, tmp_path):
    data, text = card_of(save_edited(llama, OFF, tmp_path / "edited", command="csloc edit …"))
    assert data["library_name"] == "transformers" and "base_model" not in data
    for wanted in ("L2H1, L0H3, L0H0", llama.fingerprint["weights"], "    csloc edit …"):
        assert wanted in text
    assert "does not guarantee" in text and "None was given" in text
    hub = HeadModel(llama.hf, tiny.tokenizer(), "org/name-1")
    data, _ = card_of(save_edited(hub, OFF, tmp_path / "hub"))
    assert data["base_model"] == "org/name-1"


def interval(value):
    return {"value": value, "low": value - 0.5, "high": value + 0.5}


def drop(value):
    ends = {"low": value - 0.5, "high": value + 0.5}
    return {"intact": -0.25, "ablated": -0.25 - value, "drop": value, **ends}


@pytest.fixture
def report(llama):
    """What ``csloc locate --json`` writes, as far as a card reads it."""
    score = {"beaten": 97, "drops": []}
    return {
        "ablation": "zero",
        "date": "2026-01-02T03:04:05+00:00",
        "model": {"name": "llama", "layers": 3, "heads": 4, "fingerprint": llama.fingerprint},
        "verify": {
            "heads": ["L0H0", "L0H3", "L2H1"],
            "target": {"task": "sums", "n_items": 40, "n_facts": 20, "logprob": drop(3.125)},
            "random": {"n": 100, "logprob": score},
            "specific": {"logprob": interval(2.0625)},
            "controls": {"a|b": {"task": "a|b", "n_items": 16, "logprob": drop(1.0)}},
            "settings": {"confidence": 0.9},
        },
    }


def test_the_card_tells_what_was_measured(llama, tmp_path, report):
    _, text = card_of(save_edited(llama, OFF, tmp_path / "zero", evidence=report))
    assert "3.125 [2.625, 3.625]" in text and "2.062 [1.562, 2.562]" in text
    assert "97 of 100" in text and "[90%]" in text
    side = text.split("## Side effects")[1]
    assert "| a\\|b | 16 | log-probability | -0.250 | -1.250 | 1.000 [0.500, 1.500] |" in side
    assert "was not measured" not in text
    _, text = card_of(save_edited(llama, OFF, tmp_path / "half", scale=0.5, evidence=report))
    assert "What multiplying by 0.5 does was not measured." in text
    report["verify"] |= {"controls": {}, "specific": None, "random": {"n": 0}}
    _, text = card_of(save_edited(llama, OFF, tmp_path / "bare", evidence=report))
    assert "No control task" in text and "of 100" not in text


def test_evidence_about_something_else(llama, tmp_path, report):
    def refused(message, heads=OFF):
        with pytest.raises(InputError, match=message):
            save_edited(llama, heads, tmp_path / "edited", evidence=report)
        assert not any(tmp_path.iterdir())

    refused("verifies L0H0, L0H3, L2H1, not L0H1", [Head(0, 1)])
    fingerprint = report["model"]["fingerprint"] | {"weights": "of others"}
    report["model"]["fingerprint"] = fingerprint
    refused("another model")
    fingerprint["dtype"] = "bfloat16"  # cannot be compared: the card says so
    _, text = card_of(save_edited(llama, OFF, tmp_path / "edited", evidence=report))
    assert "in bfloat16" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two checkpoints, with and without a bias, and a task."""
    path = tmp_path_factory.mktemp("edit")
    for name in ("llama", "gpt2"):
        tiny.hf_model(name).save_pretrained(path / name)
        tokenizer = tiny.tokenizer()
        tokenizer.pad_token = None
        tokenizer.save_pretrained(path / name)
    task = shown.task(tiny.head_model("llama"))
    lines = [{"task": {"name": "shown", "prefix": shown.PREFIX}}] + [
        {"prompt": item.prompt, "answer": item.answers[0], "split": split}
        for split in ("locate", "verify")
        for item in getattr(task, split)
    ]
    (path / "shown.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "no.json").write_text("{}")
    (path / "strange.json").write_text('{"verify": {"heads": 3}}')
    return path


@pytest.fixture
def run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path / "cache"))

    def call(line):
        status = cli.main(line.split())
        return status, *capsys.readouterr()

    return call


def test_the_command_writes_what_locate_found(run, tmp_path, llama):
    found = tmp_path / "found.json"
    task = "--task shown.jsonl --controls none --random 5 --dtype float32 --quiet"
    status, _, errors = run(f"locate --model llama --k 2 {task} --json {found}")
    assert status == 0, errors
    heads = [row["head"] for row in json.loads(found.read_text())["heads"]]
    line = f"edit --model llama --heads {','.join(heads)} --out {tmp_path / 'off'}"
    status, out, errors = run(f"{line} --evidence {found}")
    assert status == 0, errors
    assert "zero ablation" in out and "o_proj.weight" in out
    again = reload(tmp_path / "off")
    assert torch.equal(logits(again), masked(llama, heads=llama.grid.parse(heads)))
    _, text = card_of(tmp_path / "off")
    assert "Task shown, 20 items" in text and "of 5 " in text and f"    csloc {line}" in text
    assert "not measured on" not in text and "## Side effects" in text
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "off")
    assert tokenizer.pad_token is None  # as in the source, though measuring needs one
    assert run(f"ablate --model {tmp_path / 'off'} --heads L1H1 --task shown.jsonl")[0] == 0
    status, _, errors = run(line)
    assert status == 2 and "not empty" in errors


def test_the_command_folds_means(run, tmp_path):
    model = tiny.head_model("gpt2")
    options = f"--model gpt2 --heads L2H1,L0H3,L0H0 --out {tmp_path / 'mean'}"
    status, out, errors = run(f"edit {options} --ablation mean --task shown.jsonl --seed 1")
    assert status == 0, errors
    assert "c_proj.weight and bias" in out
    from csloc_utils.tasks import load_task

    means = token_means(model, load_task("shown.jsonl", 1))
    again = logits(reload(tmp_path / "mean"))
    torch.testing.assert_close(again, masked(model, Ablation(means)), atol=1e-5, rtol=1e-5)
    assert "locate items of task shown, seed 1" in card_of(tmp_path / "mean")[1]


def no_weights(monkeypatch):
    monkeypatch.setattr(
        models.transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **k: pytest.fail("loaded the weights"),
    )


def test_a_dry_run_loads_and_writes_nothing(run, tmp_path, monkeypatch):
    no_weights(monkeypatch)
    line = f"edit --model gpt2 --heads L2H1,L0H3 --out {tmp_path / 'new'} --dry-run "
    status, out, _ = run(line + "--scale 1.5")
    assert status == 0 and "nothing was written" in out and "times 1.5" in out
    assert re.search(r"h\.2\.attn\.c_proj\.weight +48 × 48 +L2H1 +12", out)
    status, out, _ = run(line + "--ablation mean --task shown.jsonl")
    assert status == 0 and "c_proj.weight and bias" in out
    assert not any(tmp_path.iterdir())


BAD = [
    ("--heads L0H0 --scale 2 --ablation zero", "exclude each other"),
    ("--heads L0H0 --scale -1", "scale is -1"),
    ("--heads L0H0 --scale nan", "scale is nan"),
    ("--heads L0H0 --ablation mean", "--task"),
    ("--heads L0H0 --task shown.jsonl", "--task"),
    ("--heads L0H0 --ablation mean --task shown.jsonl", "no bias"),
    ("--heads L0H0 --ablation resample", "zero, mean"),
    ("--heads L0H0,L0H0", "twice"),
    ("--heads L0H9", "does not exist"),
    ("--heads L0H0 --dtype int3", "unknown dtype"),
    ("--heads L0H0 --max-shard-size big", "no file size"),
    ("--heads L0H0 --evidence missing.json", "No such file"),
    ("--heads L0H0 --evidence shown.jsonl", "no JSON"),
    ("--heads L0H0 --evidence no.json", "no verification"),
    ("--heads L0H0 --evidence strange.json", "no report"),
    ("--heads L0H0 --out gpt2", "not empty"),
    ("", "--heads"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_is_one_line_before_the_weights_load(
    run, tmp_path, monkeypatch, options, message
):
    no_weights(monkeypatch)
    status, _, errors = run(f"edit --model llama --out {tmp_path / 'new'} {options}")
    assert status == 2 and errors.count("\n") == 1
    assert message in errors and "Traceback" not in errors
    assert not any(tmp_path.iterdir())
