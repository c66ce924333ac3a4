"""Measurements on disk: one SQLite file that sweeps, searches and chapters share.

A *context* is what a measurement depends on besides its mask: model, encoded items, ablation. A
measurement is one mask's item scores in one context and one chunk shape. Finished masks are
committed chunk by chunk, so a killed run loses at most the chunk it was in.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from csloc_utils.errors import InputError
from csloc_utils.sources import cache_folder

_VERSION = 1
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS context (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, scores TEXT NOT NULL, created TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS measurement (
    context INTEGER NOT NULL REFERENCES context(id), chunk INTEGER NOT NULL, mask BLOB NOT NULL,
    scores BLOB NOT NULL, PRIMARY KEY (context, chunk, mask)) WITHOUT ROWID;
PRAGMA user_version = {_VERSION};
"""


class Store:
    """A file of measurements.

    Parameters
    ----------
    path : str or Path, optional
        The SQLite file, made if missing; ``:memory:`` keeps nothing. By default
        ``measurements.sqlite`` in the user's cache (see `csloc_utils.sources.cache_folder`).

    Raises
    ------
    InputError
        If the file cannot be written, or is no store of this version.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = str(path or cache_folder() / "measurements.sqlite")
        try:
            if self.path != ":memory:":
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            # Autocommit: transactions are opened where they are needed, below.
            self._db = sqlite3.connect(self.path, timeout=60, isolation_level=None)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise InputError(
                    f"store {self.path} has version {version}, this csloc reads {_VERSION}: "
                    "give another --store"
                )
            if version == 0:
                if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise InputError(f"{self.path} is another database: give another --store")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"cannot use {self.path} as a store ({error}): give a --store that can be written"
            ) from error

    def context(self, key: Mapping[str, object], scores: Sequence[str]) -> int:
        """Return the number of a context, noting it if it is new.

        Parameters
        ----------
        key : mapping
            JSON-ready description of model, items and ablation.
        scores : sequence of str
            Names of the scores, in the order of the stored arrays.
        """
        text = json.dumps(key, sort_keys=True, ensure_ascii=False)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._db.execute(
            "INSERT OR IGNORE INTO context (key, scores, created) VALUES (?, ?, ?)",
            (text, json.dumps(list(scores)), now),
        )
        return self._db.execute("SELECT id FROM context WHERE key = ?", (text,)).fetchone()[0]

    def chunk(self, context: int) -> int | None:
        """Return the chunk shape of most measurements in a context, if there are any."""
        row = self._db.execute(
            "SELECT chunk FROM measurement WHERE context = ? GROUP BY chunk "
            "ORDER BY count(*) DESC LIMIT 1",
            (context,),
        ).fetchone()
        return row and row[0]

    def get(self, context: int, mask: np.ndarray, n_scores: int) -> dict[int, np.ndarray]:
        """Return what is known of a mask: chunk shape → array ``(n_scores, n_items)``."""
        rows = self._db.execute(
            "SELECT chunk, scores FROM measurement WHERE context = ? AND mask = ?",
            (context, _pack(mask)),
        )
        return {chunk: np.frombuffer(blob).reshape(n_scores, -1) for chunk, blob in rows}

    def put(self, context: int, chunk: int, masks: np.ndarray, scores: np.ndarray) -> None:
        """Keep finished masks, all of them or none.

        Parameters
        ----------
        masks : bool array (n_masks, n_heads)
        scores : float array (n_masks, n_scores, n_items)
        """
        rows = [
            (context, chunk, _pack(mask), np.ascontiguousarray(score, float).tobytes())
            for mask, score in zip(masks, scores, strict=True)
        ]
        with closing(self._db.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            try:
                cursor.executemany("INSERT OR IGNORE INTO measurement VALUES (?, ?, ?, ?)", rows)
                cursor.execute("COMMIT")
            except BaseException:
                cursor.execute("ROLLBACK")
                raise

    def __len__(self) -> int:
        return self._db.execute("SELECT count(*) FROM measurement").fetchone()[0]

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _pack(mask: np.ndarray) -> bytes:
    return np.packbits(np.asarray(mask, bool)).tobytes()
