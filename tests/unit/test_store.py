"""The store: whole transactions, one file for many processes, clear errors."""

import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from csloc_utils.errors import InputError
from csloc_utils.store import Store

KEY = {"model": {"weights": "abc"}, "items": "def", "ablation": {"kind": "zero"}}
MASKS = np.eye(3, 11, dtype=bool)
SCORES = np.arange(3 * 2 * 4, dtype=float).reshape(3, 2, 4) / 7


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "s.sqlite"
    store = Store(path)
    context = store.context(KEY, ("logprob", "accuracy"))
    store.put(context, 8, MASKS, SCORES)
    store.close()
    store = Store(path)
    assert store.context(KEY, ("logprob", "accuracy")) == context
    assert store.context(KEY | {"items": "other"}, ("logprob", "accuracy")) != context
    for mask, scores in zip(MASKS, SCORES, strict=True):
        assert (store.get(context, mask, 2)[8] == scores).all()
    assert store.get(context, np.zeros(11, bool), 2) == {}
    assert store.chunk(context) == 8 and len(store) == 3


def test_putting_twice_keeps_the_first(tmp_path):
    store = Store(tmp_path / "s.sqlite")
    store.put(1, 8, MASKS, SCORES)
    store.put(1, 8, MASKS, SCORES + 1)
    assert (store.get(1, MASKS[0], 2)[8] == SCORES[0]).all()


def test_a_chunk_is_kept_whole_or_not_at_all(tmp_path):
    store = Store(tmp_path / "s.sqlite")
    with pytest.raises(ValueError):
        store.put(1, 8, MASKS, SCORES[:2])
    assert len(store) == 0


def test_a_killed_process_leaves_finished_chunks(tmp_path):
    code = f"""
import numpy as np, os, signal
from csloc_utils.store import Store
store = Store({str(tmp_path / "s.sqlite")!r})
store.put(1, 8, np.eye(3, 11, dtype=bool), np.ones((3, 2, 4)))
store._db.execute("BEGIN IMMEDIATE")
store._db.execute("INSERT INTO measurement VALUES (1, 8, x'00', x'00')")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    store = Store(tmp_path / "s.sqlite")
    assert len(store) == 3
    store.put(1, 8, ~MASKS, SCORES)  # and it can go on at once
    assert len(store) == 6


def test_two_stores_on_one_file(tmp_path):
    a, b = Store(tmp_path / "s.sqlite"), Store(tmp_path / "s.sqlite")
    a.put(1, 8, MASKS[:1], SCORES[:1])
    b.put(1, 8, MASKS[1:], SCORES[1:])
    assert len(a) == len(b) == 3


def test_memory_store_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store(":memory:")
    store.put(1, 1, MASKS, SCORES)
    assert len(store) == 3 and list(tmp_path.iterdir()) == []


def test_files_that_are_no_store(tmp_path):
    (tmp_path / "text.txt").write_text("not a database, and long enough to have a header" * 9)
    with pytest.raises(InputError, match="as a store"):
        Store(tmp_path / "text.txt")
    with pytest.raises(InputError, match="as a store"):
        Store(tmp_path)
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE t (x)")
    other.commit()
    with pytest.raises(InputError, match="another database"):
        Store(tmp_path / "other.sqlite")
    newer = sqlite3.connect(tmp_path / "newer.sqlite")
    newer.execute("CREATE TABLE measurement (x)")
    newer.execute("PRAGMA user_version = 99")
    newer.commit()
    with pytest.raises(InputError, match="version 99"):
        Store(tmp_path / "newer.sqlite")


def test_default_place_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path))
    assert Store().path == str(tmp_path / "measurements.sqlite")
