"""The command line: results, exit status, one line for bad input, nothing loaded before it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import transformers

import shown
import tiny
from csloc_utils import cli, models
from csloc_utils.measure import Evaluator, Measurements


@pytest.fixture(scope="module")
def model():
    return tiny.head_model("llama")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A checkpoint, a task that it masters, and others."""
    path = tmp_path_factory.mktemp("cli")
    tiny.hf_model("llama").save_pretrained(path / "model")
    model.tokenizer.save_pretrained(path / "model")
    transformers.BertConfig().save_pretrained(path / "encoder")
    transformers.T5Config().save_pretrained(path / "t5")
    (path / "empty").mkdir()
    task = shown.task(model)
    header = {"task": {"name": "shown", "prefix": shown.PREFIX}}
    lines = [header] + [
        {"prompt": item.prompt, "answer": item.answers[0], "split": split}
        for split in ("locate", "verify")
        for item in getattr(task, split)
    ]
    write(path / "shown.jsonl", lines)
    control = [{"prompt": f"{a} + {b} =", "answer": "c d"} for a in "abcd" for b in "abcd"]
    write(path / "control.jsonl", control)
    answers = [item.answers[0] for item in task.locate]
    shuffled = np.random.default_rng(0).permutation(answers)
    wrong = [
        {"prompt": i.prompt, "answer": str(a)} for i, a in zip(task.locate, shuffled, strict=True)
    ]
    write(path / "wrong.jsonl", wrong)
    write(path / "long.jsonl", [{"prompt": "1 " * 80 + w, "answer": "2"} for w in "abcd"])
    return path


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(folder, tmp_path, monkeypatch, capsys):
    """Call the command line in the folder; give exit status, output and errors."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path / "cache"))

    def call(line):
        status = cli.main(line.split())
        return status, *capsys.readouterr()

    return call


PACKAGE = str(Path(cli.__file__).parent.parent)
LOCATE = "locate --model model --task shown.jsonl --controls control.jsonl --dtype float32 --quiet "


@pytest.mark.parametrize(
    ("options", "evaluations", "n_heads"),
    [
        ("--k 2", 17, 2),
        ("--k 2 --contrast control.jsonl", 34, 2),
        ("--method sweep --k 3", 13, 12),
        ("--method greedy --k 3", 1 + 12 + 11 + 10, 3),
        ("--method paper --k 3 --budget 30 --size 2", 30, 3),
    ],
)
def test_locate(run, tmp_path, options, evaluations, n_heads):
    out = tmp_path / "out.json"
    status, text, errors = run(f"{LOCATE} {options} --random 20 --json {out}")
    assert status == 0 and errors == ""
    report = json.loads(out.read_text())
    assert report["evaluations"]["equivalents"] == evaluations
    cost = report["evaluations"]["forward"] + 2 * report["evaluations"]["backward"]
    assert cost == evaluations
    assert len(report["heads"]) == n_heads and set(report["heads"][0]) >= {"head", "effect"}
    effects = [row["effect"] for row in report["heads"]]
    if "greedy" not in options:
        assert effects == sorted(effects)
    assert effects[0] < 0
    assert report["model"]["fingerprint"]["dtype"] == "float32"
    assert report["task"]["name"] == "shown" and report["seed"] == 0
    assert report["baseline"]["accuracy"] == 1 and report["gate"]["passed"]
    assert {"csloc", "torch", "transformers", "nnsight"} <= set(report["versions"])
    verify = report["verify"]
    assert verify["target"]["accuracy"]["drop"] > 0
    assert len(verify["random"]["logprob"]["drops"]) == 20
    assert set(verify["controls"]) == {"control.jsonl"}
    assert verify["controls"]["control.jsonl"]["random"]["n"] == 10
    assert report["heads"][0]["head"] in text


def test_a_race_says_whether_it_is_settled(run, tmp_path):
    out = tmp_path / "out.json"
    line = f"{LOCATE} --method race --k 1 --random 5 --json {out} "
    status, text, _ = run(line + "--tolerance 100")
    report = json.loads(out.read_text())
    assert status == 0 and "settled: the first 1" in text and "not settled" not in text
    assert report["evaluations"]["equivalents"] < 13 and report["settled"] is True
    status, text, _ = run(line + "--confidence 0.9999999")
    assert status == 0 and "not settled" in text
    assert json.loads(out.read_text())["settled"] is False


def test_locate_twice_gives_the_same_and_measures_nothing_again(run, tmp_path, monkeypatch):
    line = f"{LOCATE} --method sweep --random 5 --json {tmp_path / 'out.json'}"
    run(line)
    first = json.loads((tmp_path / "out.json").read_text())
    score = Evaluator._score

    def only_gate(self, masks, base):
        assert not masks.any(), "ran a stored mask"
        return score(self, masks, base)

    monkeypatch.setattr(Evaluator, "_score", only_gate)
    run(line)
    again = json.loads((tmp_path / "out.json").read_text())
    assert again | {"date": ""} == first | {"date": ""}


def test_ablate_agrees_with_the_model_without_these_weights(run, tmp_path, model):
    out = tmp_path / "out.json"
    status, text, _ = run(
        "ablate --model model --heads L2H1,L0H3 --task shown.jsonl --task control.jsonl "
        f"--dtype float32 --quiet --split all --json {out}"
    )
    report = json.loads(out.read_text())
    assert status == 0 and report["heads"] == ["L2H1", "L0H3"]
    assert [(r["task"], r["items"]) for r in report["results"]] == [("shown", 40), ("control", 16)]
    from test_ablation import without_columns

    hf = without_columns("llama", model.grid.parse("L2H1,L0H3"))
    task = shown.task(model)
    logprobs = []
    for item in task.items("all"):
        ids = model.tokenizer(task.join(item, item.answers[0]), return_tensors="pt").input_ids
        logprobs.append(float(hf(ids).logits[0, -2].log_softmax(-1)[ids[0, -1]].detach()))
    result = report["results"][0]
    assert result["ablated"]["logprob"] == pytest.approx(np.mean(logprobs), abs=1e-4)
    assert result["intact"]["accuracy"] == 1
    assert result["drop"]["logprob"]["value"] == pytest.approx(
        result["intact"]["logprob"] - result["ablated"]["logprob"]
    )


def test_capability_that_is_not_there(run, tmp_path):
    out = tmp_path / "out.json"
    status, _, errors = run(
        f"locate --model model --task wrong.jsonl --no-verify --quiet --json {out}"
    )
    assert status == 1
    assert "does not show this capability" in errors and errors.count("\n") == 1
    report = json.loads(out.read_text())
    assert report["heads"] == [] and not report["gate"]["passed"] and "verify" not in report


def test_lists(run):
    status, text, _ = run("models")
    assert status == 0 and "smollm2-135m-q4" in text
    status, text, _ = run("tasks")
    assert status == 0 and "multiplication" in text


BAD = [
    ("", "COMMAND"),
    ("find", "invalid choice"),
    ("locate", "--task"),
    ("locate --model model --task no-such-task", "unknown task"),
    ("locate --model model --task missing.jsonl", "no such file"),
    ("locate --model model --task shown.jsonl --k 0", "k is 0"),
    ("locate --model model --task shown.jsonl --k 13", "from 1 to 12"),
    ("locate --model model --task shown.jsonl --k two", "invalid int"),
    ("locate --model model --task shown.jsonl --budget 1", "budget of 1"),
    ("locate --model model --task shown.jsonl --method sweep --budget 5", "at least 13"),
    ("locate --model model --task shown.jsonl --method magic", "unknown method"),
    ("locate --model model --task shown.jsonl --method paper --design latin", "unknown design"),
    ("locate --model model --task shown.jsonl --method paper --size 13", "mask size"),
    ("locate --model model --task shown.jsonl --budget 20", "takes at least 21"),
    ("locate --model model --task shown.jsonl --method paper --contrast text", "--contrast"),
    ("locate --model model --task shown.jsonl --contrast shown.jsonl", "the task itself"),
    ("locate --model model --task shown.jsonl --confidence 0.9", "are for a race"),
    ("locate --model model --task shown.jsonl --method race --confidence 2", "between 0 and 1"),
    ("locate --model model --task shown.jsonl --method race --tolerance -1", "0 or more"),
    ("locate --model model --task shown.jsonl --method race --k 12", "from 1 to 11"),
    ("locate --model model --task shown.jsonl --seed -1", "seed"),
    ("locate --model model --task shown.jsonl --items 0", "items"),
    ("locate --model model --task shown.jsonl --items 21", "21"),
    ("locate --model model --task shown.jsonl --score bleu", "unknown score"),
    ("locate --model model --task shown.jsonl --dtype int3", "unknown dtype"),
    ("locate --model model --task shown.jsonl --device gpu9", "device"),
    ("locate --model model --task shown.jsonl --ablation noise", "unknown ablation"),
    ("locate --model model --task shown.jsonl --controls nothing", "unknown task"),
    ("locate --model model --task shown.jsonl --random -1", "random"),
    ("locate --model model --task shown.jsonl --json no/such/out.json", "no folder"),
    ("locate --model model --task shown.jsonl --json empty", "it is a folder"),
    ("locate --model model --task shown.jsonl --store empty", "as a store"),
    ("locate --model model --task long.jsonl", "at most 64"),
    ("locate --model no-such-model --task shown.jsonl", "unknown model"),
    ("locate --model empty --task shown.jsonl", "no config.json"),
    ("locate --model encoder --task shown.jsonl", "not a causal language model"),
    ("locate --model t5 --task shown.jsonl", "encoder-decoder"),
    ("ablate --model model --task shown.jsonl", "--heads"),
    ("ablate --model model --task shown.jsonl --heads L1H", "like L16H21"),
    ("ablate --model model --task shown.jsonl --heads L9H0", "layers 0 … 2"),
    ("ablate --model model --task shown.jsonl --heads L1H1,L1H1", "twice"),
    ("ablate --model model --task shown.jsonl --heads L0H0 --split test", "unknown split"),
    ("ablate --model model --task model --heads L0H0", "a folder"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_input_is_one_line_before_the_weights_load(run, monkeypatch, line, message):
    monkeypatch.setattr(
        models.transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **k: pytest.fail("loaded the weights"),
    )
    status, text, errors = run(line)
    assert status == 2
    assert errors.startswith("csloc: error: ") and errors.count("\n") == 1
    assert message in errors and "Traceback" not in errors


def test_masks_that_all_have_the_same_effect(run, monkeypatch):
    monkeypatch.setattr(Measurements, "effects", lambda self, score="": np.zeros(len(self.masks)))
    status, _, errors = run(f"{LOCATE} --method paper --budget 5 --size 1 --k 1 --no-verify")
    assert status == 2 and "same effect" in errors


def test_debug_shows_the_traceback(run):
    from csloc_utils.errors import InputError

    with pytest.raises(InputError):
        run("locate --model model --task shown.jsonl --k 0 --debug")


def test_interrupt_says_how_to_resume(run, monkeypatch):
    def interrupted(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluator, "_score", interrupted)
    line = f"{LOCATE} --method sweep --no-verify"
    status, _, errors = run(line)
    assert status == 130 and f"Resume: csloc {' '.join(line.split())}" in errors


def test_kill_and_resume_equals_an_uninterrupted_run(run, folder, tmp_path, monkeypatch):
    """Public reports: nteract/papermill #478 (a dead kernel loses the run)."""
    line = f"{LOCATE} --method greedy --k 4 --random 5 --json {tmp_path / 'out.json'}"

    def result():
        status, _, errors = run(line)
        assert status == 0, errors
        return json.loads((tmp_path / "out.json").read_text()) | {"date": ""}

    whole = result()
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path / "killed"))
    command = [sys.executable, "-m", "csloc_utils.cli", *line.split()]
    environment = os.environ | {"PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    log = tmp_path / "killed" / "measurements.sqlite-wal"
    while process.poll() is None and not (log.exists() and log.stat().st_size > 30000):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it finished before it could be killed"
    assert result() == whole


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and re.match(r"csloc \d", capsys.readouterr().out)


def test_plan_counts_as_locate_does(run):
    status, out, _ = run("plan --model model --task shown.jsonl --k 2")
    assert status == 0
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines()[2:6]}
    assert rows == {"screened": "17", "paper": "23", "sweep": "13", "greedy": "24"}
    status, out, _ = run("plan --model model --task shown.jsonl --k 2 --seconds 60")
    assert " 17.0" in out and "60.00 s a mask" in out
    assert "race, at most" in out
    assert run("plan --model model --task shown.jsonl --k 13")[0] == 2
    assert run("plan --model model --task shown.jsonl --k 2 --dtype float99 --seconds 1")[0] == 2


def test_a_regression_says_what_its_masks_support(run):
    line = f"{LOCATE} --method paper --k 2 --budget 21 --size 2 --no-verify"
    status, out, errors = run(line)
    assert status == 0, errors
    assert "design: 20 masks" in out and "R² on held-out masks" in out
    assert "design:" not in run(f"{LOCATE} --k 2 --no-verify")[1]
