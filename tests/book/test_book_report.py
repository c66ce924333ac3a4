"""The page of `csloc report` in a headless browser: drawn, quiet, and printable."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest
import websocket

from csloc_utils.report import make_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of a made-up run of a usual size."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "run.json").write_text(json.dumps(made_up()), "utf8")
    make_report(folder / "run.json", folder / "page.html")
    return folder / "page.html"


def made_up() -> dict:
    """A result as `csloc locate` writes it; all numbers are invented."""
    heads = ["L1H0", "L20H8", "L10H3", "L21H2", "L16H1"]
    interval = {"value": 1.5, "low": 1.0, "high": 2.0}
    drop = {"intact": -1.0, "ablated": -2.5, "drop": 1.5, "low": 1.0, "high": 2.0}
    drawn = {"mean": 0.4, "max": 0.9, "beaten": 10, "beats": 1.0, "p_value": 0.1}
    drawn["drops"] = [0.1 * i for i in range(10)]
    scores = {"logprob": drop, "accuracy": drop}
    random = {"n": 10, "logprob": drawn, "accuracy": drawn}
    damage = {"task": "multiplication", "n_items": 58, "n_facts": 31, **scores}
    rows = [
        {"head": h, "effect": -1.5, "coef": -1.5, "selected": True, "n_masks": 9, "aliases": []}
        for h in heads
    ]
    controls = {n: {**damage, "task": n, "random": random} for n in ("copying", "capitals", "text")}
    fingerprint = {"weights": "5e65" * 16, "config": "7807" * 16, "dtype": "float32"}
    task = {"name": "multiplication", "capability": "multiplying two numbers", "source": "built-in"}
    return {
        "command": "csloc locate --task multiplication --method paper --json run.json",
        "date": "2026-01-01T00:00:00+00:00",
        "model": {
            "name": "some-model",
            "layers": 30,
            "heads": 9,
            "fingerprint": {**fingerprint, "device": "cpu"},
        },
        "ablation": "zero",
        "versions": {"csloc": "0.1.0", "python": "3.11.0"},
        "task": {
            **task,
            "scoring": "continuation",
            "seed": 0,
            "items": 24,
            "fingerprint": "47" * 32,
        },
        "seed": 0,
        "method": "paper",
        "k": 5,
        "score": "logprob",
        "gate": {
            "task": "multiplication",
            "accuracy": 0.8,
            "chance": 0.0,
            "above_chance": interval,
            "above_permuted": {"value": 15.0, "low": 12.0, "high": 18.0},
            "n_items": 24,
            "passed": True,
        },
        "heads": rows,
        "evaluations": {"forward": 150, "backward": 0, "equivalents": 150},
        "design": "stratified",
        "mask_size": 5,
        "never_ablated": [],
        "all_heads": {"what": "coefficient", "values": [-0.01 * (i % 9) for i in range(270)]},
        "diagnosis": {
            "n_masks": 149,
            "least": 2,
            "most": 3,
            "pair_coverage": 0.04,
            "coherence": 1.0,
            "held_out_r2": 0.3,
            "warnings": ["some heads were always off together: no regression tells them apart"],
        },
        "verify": {
            "heads": heads,
            "target": damage,
            "random": random,
            "controls": controls,
            "specific": {"logprob": interval, "accuracy": interval},
            "each": [{"head": h, "single": interval, "given_others": interval} for h in heads],
            "settings": {"seed": 0, "n_boot": 2000, "confidence": 0.95},
        },
    }


class Tab:
    """A tab of a headless browser, spoken to by its debugging protocol."""

    def __init__(self, port: int):
        """Open a tab and listen to what it loads and complains about."""
        new = urllib.request.Request(f"http://127.0.0.1:{port}/json/new", method="PUT")
        with urllib.request.urlopen(new, timeout=20) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        self.socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        self.number, self.events = 0, []
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        self.socket.send(json.dumps(message))
        while (reply := json.loads(self.socket.recv())).get("id") != self.number:
            self.events.append(reply)
        assert "error" not in reply, reply
        return reply["result"]

    def open(self, path: Path) -> None:
        self.events.clear()
        self.ask("Page.navigate", url=path.as_uri())
        for _ in range(200):
            if self.value("document.readyState") == "complete" and self.seen("Page.loadEventFired"):
                return
            time.sleep(0.05)
        pytest.fail("the page did not load")

    def seen(self, method: str) -> list[dict]:
        return [event["params"] for event in self.events if event["method"] == method]

    def value(self, expression: str):
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    browser = subprocess.Popen(
        [BROWSER, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    port = folder / "DevToolsActivePort"
    try:
        for _ in range(600):
            if browser.poll() is not None:
                pytest.fail(f"{BROWSER} ended at its start with status {browser.returncode}")
            if port.is_file() and port.read_text().count("\n"):
                break
            time.sleep(0.05)
        yield Tab(int(port.read_text().splitlines()[0]))
    finally:
        browser.terminate()
        browser.wait(20)


@needs_browser
@pytest.mark.parametrize("width", [1200, 380])
def test_the_page_is_drawn_and_asks_for_nothing(tab, page, width):
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    tab.ask("Emulation.setDeviceMetricsOverride", **size)
    tab.open(page)
    widths = tab.value("[...document.images].map(i => i.complete ? i.naturalWidth : 0)")
    assert len(widths) == 3 and min(widths) > 300
    shown = tab.value("[...document.images].map(i => i.getBoundingClientRect().right)")
    assert max(shown) <= width
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert not tab.value("[...document.images].filter(i => i.alt.length < 30).length")
    assert not tab.seen("Runtime.exceptionThrown") and not tab.seen("Log.entryAdded")
    assert not tab.seen("Runtime.consoleAPICalled")
    addresses = {event["request"]["url"] for event in tab.seen("Network.requestWillBeSent")}
    assert {a for a in addresses if not a.startswith("data:")} == {page.as_uri()}


@needs_browser
def test_the_page_prints_on_a_few_sheets(tab, page):
    tab.ask("Emulation.clearDeviceMetricsOverride")
    tab.open(page)
    printed = tab.ask("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
    content = base64.b64decode(printed["data"])
    assert 2 <= len(re.findall(rb"/Type ?/Page\b", content)) <= 6
    boxes = re.findall(rb"/MediaBox ?\[0 0 ([\d.]+) ([\d.]+)\]", content)
    assert boxes and all(abs(float(w) - 595) < 2 and abs(float(h) - 842) < 2 for w, h in boxes), (
        boxes
    )


def test_the_wheel_holds_what_a_report_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert {"csloc_utils/report.ipynb", "csloc_utils/report_page.html"} <= inside
