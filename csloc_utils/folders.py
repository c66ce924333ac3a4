"""Writing a folder whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from csloc_utils.errors import InputError


def check_folder(out: str | os.PathLike[str], n_bytes: int = 0) -> Path:
    """Return where a checkpoint of `n_bytes` will be written, or raise `InputError`.

    The place must not exist or be an empty folder, in a folder that can be written to and has
    room. Links are followed.
    """
    with _explained(out):
        target = Path(os.path.realpath(out))
        if target.is_dir() and any(target.iterdir()):
            raise InputError(f"{out} is not empty, and nothing is overwritten: give a new folder")
        if target.exists() and not target.is_dir():
            raise InputError(f"{out} is a file, and nothing is overwritten: give a new folder")
        if not target.parent.is_dir():
            raise InputError(f"cannot write {out}: there is no folder {target.parent}; make it")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".csloc-"):
            pass  # it can be written to
        free = shutil.disk_usage(target.parent).free
    if n_bytes > free:
        raise InputError(
            f"the checkpoint takes {n_bytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free at "
            f"{out}: make room or choose another disk"
        )
    return target


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill; it takes the name `target` when all is written, or goes away."""
    with (
        _explained(target),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".csloc-") as scratch,
    ):
        folder = Path(scratch) / target.name  # ordinary permissions; the scratch folder's are not
        folder.mkdir()
        yield folder
        if target.is_dir():
            target.rmdir()  # refuses one that has been filled meanwhile
        folder.rename(target)


@contextmanager
def _explained(out: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write {out}: {reason}; choose another place") from error
