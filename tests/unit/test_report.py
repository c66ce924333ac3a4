"""The page of a run: what it says for every kind of run, that it is whole, and what it refuses."""

import json
import os
import re
import subprocess
import sys

import pytest
from bs4 import BeautifulSoup

import shown
import tiny
from csloc_utils import cli, report, report_sections, report_text
from csloc_utils.errors import InputError

LOCATE = "locate --model model --task shown.jsonl --controls control.jsonl --dtype float32 --quiet "
RUNS = {
    "screened": "--k 2 --random 20",
    "paper": "--method paper --k 3 --budget 30 --size 2 --random 5",
    "sweep": "--method sweep --k 3 --random 5",
    "race": "--method race --k 2 --random 5 --score accuracy",
    "greedy": "--method greedy --k 2 --random 0",
    "unverified": "--k 1 --no-verify",
    "contrast": "--k 2 --contrast control.jsonl --controls none --random 5",
    "gate": "--task wrong.jsonl --no-verify",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of every kind of run, in a folder."""
    folder = tmp_path_factory.mktemp("runs")
    model = tiny.head_model("llama")
    tiny.hf_model("llama").save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    task = shown.task(model)
    items = [
        {"prompt": i.prompt, "answer": i.answers[0], "split": split}
        for split in ("locate", "verify")
        for i in getattr(task, split)
    ]
    lines = {
        "shown": [{"task": {"name": "shown", "prefix": shown.PREFIX}}, *items],
        "control": [{"prompt": f"{a} + {b} =", "answer": "c d"} for a in "abcd" for b in "abcd"],
        "wrong": [{"prompt": a["prompt"], "answer": b["answer"]} for a, b in zip(items, items[7:])],
    }
    for name, rows in lines.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    before = os.getcwd()
    os.chdir(folder)
    os.environ["CSLOC_CACHE"] = str(folder / "cache")
    try:
        for name, options in RUNS.items():
            line = f"{LOCATE} {options} --json {name}.json"
            assert cli.main(line.split()) == (name == "gate")
    finally:
        os.chdir(before)
        del os.environ["CSLOC_CACHE"]
    return folder


def words(run, *names):
    html = "".join(getattr(report_sections, name)(run) for name in names)
    text = BeautifulSoup(html, "html.parser").get_text(" ")
    return " ".join(text.replace("\N{MINUS SIGN}", "-").split())


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_is_read(runs, name):
    run = report.read_run(runs / f"{name}.json")
    for section in report_sections.SECTIONS:
        html = section(run)
        text = BeautifulSoup(html, "html.parser").get_text(" ")
        assert not re.search(r"\bnan\b|: None|\{|\}", text)
        for image in BeautifulSoup(html, "html.parser").find_all("img"):
            assert len(image["alt"]) > 20 and image["src"].startswith("data:image/png;base64,")
    assert run["model"]["fingerprint"]["weights"] in report_sections.provenance(run)
    assert run["command"] in words(run, "asked")
    for head in report_text.found(run):
        assert head in words(run, "answer") and head in words(run, "heads")


def test_the_answer_is_chosen_by_the_numbers(runs):
    run = report.read_run(runs / "screened.json")
    target = run["verify"]["target"]["logprob"]
    assert f"loses {target['drop']:.2f} [{target['low']:.2f}, " in words(run, "answer")
    assert "No head was found" not in words(run, "answer")
    target["low"] = -0.01
    assert "No head was found" in words(run, "answer")
    assert "was verified on other items" in words(
        report.read_run(runs / "unverified.json"), "answer"
    )
    closed = report.read_run(runs / "gate.json")
    assert "does not show the capability" in words(closed, "answer")
    assert "closed" in words(closed, "gate") and "No search was run" in words(closed, "recovery")


def test_heads_have_both_intervals(runs):
    run = report.read_run(runs / "screened.json")
    for head in run["verify"]["each"]:
        for name in ("single", "given_others"):
            value = head[name]["value"]
            assert f"{value:.2f}".replace("-0.00", "0.00") in words(run, "heads")
    assert "not verified" in words(report.read_run(runs / "unverified.json"), "heads").lower()


def test_a_regression_shows_whether_its_assumptions_hold(runs):
    run = report.read_run(runs / "paper.json")
    made = run["diagnosis"]
    text = words(run, "recovery")
    assert f"{made['held_out_r2']:.2f} on masks that the fit did not see" in text
    assert f"a head is off in {made['least']} to {made['most']} masks" in text
    assert all(warning in text for warning in made["warnings"])
    assert len(run["all_heads"]["values"]) == 12 and run["all_heads"]["what"] == "coefficient"
    for row in run["heads"]:
        assert any(v == row["coef"] for v in run["all_heads"]["values"])
    del run["diagnosis"], run["all_heads"]  # as an older version wrote it
    assert "not in this result" in words(run, "recovery", "map_figure")


def test_control_tasks_that_lose_as_well_are_named(runs):
    run = report.read_run(runs / "screened.json")
    control = run["verify"]["controls"]["control.jsonl"]
    n = control["random"]["n"]
    control["logprob"] |= {"drop": 2.0, "low": 1.0, "high": 3.0}
    control["random"]["logprob"]["beaten"] = n
    assert "needed by other tasks as well: control.jsonl" in words(run, "universal")
    control["random"]["logprob"]["beaten"] = n - 1
    assert "No sign of universal heads" in words(run, "universal")
    assert "Not known" in words(report.read_run(runs / "contrast.json"), "universal")


def test_answers_that_were_written_have_no_log_probability(runs):
    run = report.read_run(runs / "screened.json")
    for part in (run["verify"]["target"], run["verify"]["random"], run["verify"]["specific"]):
        del part["logprob"]
    assert "of accuracy on" in words(run, "answer")
    assert "drop in accuracy" in words(run, "heads").lower()
    assert "img" in report_sections.damage_figure(run) + report_sections.heads_figure(run)


def test_names_are_shown_as_written_and_not_as_html(runs):
    run = report.read_run(runs / "screened.json")
    run["task"]["name"] = run["model"]["name"] = run["verify"]["target"]["task"] = "<b>&x"
    run["verify"]["controls"]["<script>"] = run["verify"]["controls"].pop("control.jsonl")
    html = "".join(section(run) for section in (report_sections.title, *report_sections.SECTIONS))
    assert "<b>" not in html and "<script>" not in html and "&lt;script&gt;" in html


def broken(text, **changes):
    run = json.loads(text) | changes
    return json.dumps({name: value for name, value in run.items() if value != "gone"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda t: None, "cannot read"),
        (lambda t: t[:200], "it is no JSON"),
        (lambda t: "[1, 2]", "no complete result"),
        (lambda t: "{}", "no complete result"),
        (lambda t: json.dumps({"results": [], "heads": ["L0H0"]}), "csloc ablate"),
        (lambda t: broken(t, gate="gone"), "no complete result"),
        (lambda t: broken(t, verify={}), "no complete result"),
        (lambda t: broken(t, heads=[{"head": "L9H9", "effect": 1.0}]), "no complete result"),
        (lambda t: broken(t, method="magic"), "no complete result"),
    ],
)
def test_bad_input_is_one_line_before_the_notebook_runs(
    runs, tmp_path, monkeypatch, capsys, content, message
):
    monkeypatch.setattr(report, "_execute", lambda path: pytest.fail("ran the notebook"))
    text = content((runs / "screened.json").read_text())
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    assert cli.main(["report", str(tmp_path / "run.json")]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "run.html").exists()


def test_places_that_cannot_be_written(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_execute", lambda path: "<p>new</p>")
    out = tmp_path / "page.html"
    out.write_text("old")
    with pytest.raises(InputError, match="there already"):
        report.make_report(runs / "screened.json", out)
    assert out.read_text() == "old"
    report.make_report(runs / "screened.json", out, force=True)
    assert "<p>new</p>" in out.read_text() and "$" not in out.read_text()
    with pytest.raises(InputError, match="no folder"):
        report.make_report(runs / "screened.json", tmp_path / "no" / "page.html")
    monkeypatch.setattr(report, "_NEEDED", ("papermill", "no_such_package"))
    with pytest.raises(InputError, match=r"needs no_such_package: .*csloc\[report\]"):
        report.make_report(runs / "screened.json", tmp_path / "other.html")


def test_the_page_is_whole_and_runs_in_this_interpreter(runs, tmp_path, capsys):
    """Another environment's kernel called python3 must not be asked."""
    foreign = tmp_path / "jupyter" / "kernels" / "python3"
    foreign.mkdir(parents=True)
    spec = {"argv": ["false"], "display_name": "foreign", "language": "python"}
    (foreign / "kernel.json").write_text(json.dumps(spec))
    out = tmp_path / "page.html"
    command = [sys.executable, "-m", "csloc_utils.cli", "report", str(runs / "paper.json")]
    environment = os.environ | {"JUPYTER_PATH": str(tmp_path / "jupyter")}
    environment["PYTHONPATH"] = str(report._HERE.parent)
    done = subprocess.run(
        [*command, "--out", str(out)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and str(out) in done.stdout
    html = out.read_text()
    page = BeautifulSoup(html, "html.parser")
    assert len(page.find_all("h1")) == 1 and len(page.find_all("img")) == 3
    assert not page.find_all(["script", "link", "iframe"])
    outside = re.sub(r'"data:image/png;base64,[^"]*"', "", html)
    assert not re.search(r"https?://|url\(|@import|import |In \[", outside)
    assert "csloc report paper.json" in page.get_text()
    assert [path.name for path in tmp_path.iterdir()].count("page.html") == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".csloc")]


def test_locate_says_how_to_make_it(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    monkeypatch.setenv("CSLOC_CACHE", str(runs / "cache"))
    cli.main(f"{LOCATE} --k 1 --no-verify --json again.json".split())
    assert capsys.readouterr().out.endswith("csloc report again.json\n")
    cli.main(f"{LOCATE} --k 1 --no-verify".split())
    assert "--json FILE keeps the result" in capsys.readouterr().out
