"""Where a model runs and in which numbers: devices, dtypes, and whether the weights will fit."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
import transformers

from csloc_utils.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def fast_dtype(device: torch.device | str) -> torch.dtype:
    """Return the dtype that `device` multiplies fast at the best accuracy it offers.

    The environment variable ``CSLOC_DTYPE`` decides when it is set: the book asks for float32.

    Raises
    ------
    InputError
        If the variable names no dtype.
    """
    device, asked = torch.device(device), os.environ.get("CSLOC_DTYPE") or "auto"
    if asked not in ("auto", *DTYPES):
        raise InputError(f"CSLOC_DTYPE={asked}: choose from auto, {', '.join(DTYPES)}")
    if asked != "auto":
        return DTYPES[asked]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    if device.type == "cpu":
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        if any(getattr(torch.cpu, probe, bool)() for probe in probes):
            return torch.bfloat16
    return torch.float32


def find_device(device: str) -> torch.device:
    """Return the device to run on; "auto" is a GPU if there is one.

    Raises
    ------
    InputError
        If it cannot be used on this machine.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
        torch.zeros(1, device=where).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {device!r} cannot be used here ({reason}): try cpu") from error
    return where


def check_memory(
    config: Any, dtype: torch.dtype, device: torch.device, spread: bool = False, name: str = "model"
) -> None:
    """Raise `InputError` if a model's weights are larger than the memory that is free.

    Parameters
    ----------
    config : transformers configuration
    dtype, device
        What the weights would be loaded as, and where to.
    spread : bool
        Whether all GPUs and the computer's memory count, not just the device's.
    name : str
        For the message.
    """
    with torch.device("meta"):
        try:
            empty = transformers.AutoModelForCausalLM.from_config(config)
        except Exception:  # code of its own, say: then loading will tell
            return
    parameters = sum(p.numel() for p in empty.parameters())
    needed, free = parameters * dtype.itemsize, psutil.virtual_memory().available
    if device.type == "cuda":
        gpus = range(torch.cuda.device_count()) if spread else [device]
        free = sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus) + spread * free
    if needed > free:
        smaller = [
            f"--dtype {kind} ({parameters * 2 / 1e9:.1f} GB)"
            for kind in ("bfloat16",)
            if dtype.itemsize > 2 and parameters * 2 <= free
        ]
        smaller += ["--device-map auto"] * (device.type == "cuda" and not spread)
        raise InputError(
            f"{name} has {parameters / 1e9:.2f} billion parameters, {needed / 1e9:.1f} GB in "
            f"{str(dtype).removeprefix('torch.')}, and {free / 1e9:.1f} GB are free: use "
            f"{' or '.join([*smaller, 'a smaller model (see `csloc models`)'])}"
        )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, in any of the ways in which torch says it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        phrase in str(error).lower()
        for phrase in ("out of memory", "not enough memory", "can't allocate", "alloc_failed")
    )
