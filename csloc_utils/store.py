"""Measurements on disk: one SQLite file that sweeps, searches and chapters share.

A *context* is what a measurement depends on besides its mask: model, encoded items, ablation. A
measurement is one mask's item scores in one context and one chunk shape. Finished masks are
committed chunk by chunk, so a killed run loses at most the chunk it was in.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from csloc_utils.errors import InputError
from csloc_utils.sources import cache_folder

_VERSION = 2
_SLOPES = (
    "CREATE TABLE slopes (context INTEGER NOT NULL REFERENCES context(id), point TEXT NOT NULL, "
    "slopes BLOB NOT NULL, PRIMARY KEY (context, point)) WITHOUT ROWID"
)
_SCHEMA = (
    "CREATE TABLE context (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, "
    "scores TEXT NOT NULL, created TEXT NOT NULL)",
    "CREATE TABLE measurement (context INTEGER NOT NULL REFERENCES context(id), "
    "chunk INTEGER NOT NULL, mask BLOB NOT NULL, scores BLOB NOT NULL, "
    "PRIMARY KEY (context, chunk, mask)) WITHOUT ROWID",
    _SLOPES,
    f"PRAGMA user_version = {_VERSION}",
)


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
        self.path = os.fspath(path or cache_folder() / "measurements.sqlite")
        with self._explained():
            if self.path != ":memory:":
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            # Autocommit: transactions are opened where they are needed, below.
            self._db = sqlite3.connect(self.path, timeout=60, isolation_level=None)
            with self._transaction():
                self._make_tables()
            # The mode stays with the file, so whoever comes first sets it; the switch does not wait
            # for others as every other statement does, and it is only for speed.
            with suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA journal_mode = WAL")

    def _make_tables(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master")}
        if version == 0 and not tables:
            for statement in _SCHEMA:
                self._db.execute(statement)
        elif version == 1 and {"context", "measurement"} <= tables:  # from before gradients
            self._db.execute(_SLOPES)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
        elif version > _VERSION and "measurement" in tables:
            raise InputError(
                f"store {self.path} has version {version}, this csloc reads {_VERSION}: "
                "give another --store"
            )
        elif version != _VERSION or not {"context", "measurement"} <= tables:
            raise InputError(f"{self.path} is another database: give another --store")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what SQLite and the file system raise into one `InputError`."""
        try:
            yield
        except (OSError, ValueError, sqlite3.Error) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"cannot use {self.path!r} as a store ({error}): give a --store that can be written"
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, also when the process is killed."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

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
        find = "SELECT id FROM context WHERE key = ?"
        with self._explained():
            if not self._db.execute(find, (text,)).fetchone():
                self._db.execute(
                    "INSERT OR IGNORE INTO context (key, scores, created) VALUES (?, ?, ?)",
                    (text, json.dumps(list(scores)), now),
                )
            return self._db.execute(find, (text,)).fetchone()[0]

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
        with self._explained(), self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO measurement VALUES (?, ?, ?, ?)", rows)

    def all(self, context: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the packed masks of a context and chunk shape, and their scores, a row each."""
        rows = self._db.execute(
            "SELECT mask, scores FROM measurement WHERE context = ? AND chunk = ? ORDER BY mask",
            (context, chunk),
        ).fetchall()
        masks = [np.frombuffer(mask, np.uint8) for mask, _ in rows]
        return np.array(masks), np.array([np.frombuffer(scores) for _, scores in rows])

    def all_slopes(self, context: int) -> dict[str, np.ndarray]:
        """Return the slopes of a context by their points."""
        query = "SELECT point, slopes FROM slopes WHERE context = ? ORDER BY point"
        return {p: np.frombuffer(blob) for p, blob in self._db.execute(query, (context,))}

    def get_slopes(self, context: int, point: str) -> np.ndarray | None:
        """Return the slopes at a point ``(n_heads,)``, if they are known."""
        query = "SELECT slopes FROM slopes WHERE context = ? AND point = ?"
        row = self._db.execute(query, (context, point)).fetchone()
        return row and np.frombuffer(row[0])

    def put_slopes(self, context: int, point: str, slopes: np.ndarray) -> None:
        """Keep the slopes at a point, which a text of the caller's names."""
        blob = np.ascontiguousarray(slopes, float).tobytes()
        with self._explained(), self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO slopes VALUES (?, ?, ?)", (context, point, blob)
            )

    def __len__(self) -> int:
        return self._db.execute("SELECT count(*) FROM measurement").fetchone()[0]

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _pack(mask: np.ndarray) -> bytes:
    return np.packbits(np.asarray(mask, bool)).tobytes()
