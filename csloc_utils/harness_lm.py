"""A language model as lm-evaluation-harness wants it, with heads switched off beneath."""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from csloc_utils.ablation import forward
from csloc_utils.models import HeadModel
from csloc_utils.sources import quiet

# The harness's own defaults, so that its few-shot examples are the ones of published numbers.
SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}


def rehearsal() -> Any:
    """A model that answers at once and always the same: shows what a task asks and returns."""
    from lm_eval.api.model import LM

    class Rehearsal(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [(-1.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [-1.0] * len(requests)

        def generate_until(self, requests: list[Any]) -> list[str]:
            return ["A"] * len(requests)

    return Rehearsal()


def masked_lm(wrapped: HeadModel, batch_size: int) -> Any:
    """The harness's Hugging Face model with heads off, as its attribute `mask` says."""
    from lm_eval.models.huggingface import HFLM

    class MaskedLM(HFLM):
        mask = np.zeros(wrapped.grid.size, bool)
        _running: Any = None  # none while it is built, or its weights would be tied anew

        @property
        def model(self) -> Any:
            return self._running

        @property
        def eot_token_id(self) -> int:
            eos = self.tokenizer.eos_token_id
            return self.tokenizer.pad_token_id if eos is None else eos

        def _model_call(self, inps: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            masks = np.repeat(self.mask[None], len(inps), axis=0)
            # Rows are padded behind their text, where nothing that is scored looks.
            return forward(wrapped, inps, torch.ones_like(inps), masks).logits

        def _model_generate(self, *args: Any, **options: Any) -> torch.Tensor:
            self._running = _writer(wrapped, self.mask)
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    # Its loop over steps has no end of its own; nnsight warns of that.
                    warnings.filterwarnings("ignore", message=".*was never reached")
                    return super()._model_generate(*args, **options)
            finally:
                self._running = wrapped.hf

    tokenizer = copy.copy(wrapped.tokenizer)  # the harness changes its padding side
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    with apart():
        lm = MaskedLM(
            pretrained=wrapped.hf,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            logits_cache=False,
            prefix_token_id=tokenizer.pad_token_id if start is None else start,
        )
    lm._running = wrapped.hf
    return lm


def _writer(model: HeadModel, mask: np.ndarray) -> Any:
    """Return what generates with these heads off: the model itself, or an edited trace of it."""
    grid = model.grid
    off = torch.from_numpy(mask.reshape(grid.shape)).repeat_interleave(grid.head_width, dim=1)
    off = off.to(model.device)
    edited = [layer for layer in range(grid.n_layers) if off[layer].any()]
    if not edited:
        return model.hf
    with model.nn.edit() as (tracer, editor):
        for _ in tracer.iter[:]:  # the prompt and every later step
            for layer in edited:
                projection = model.projections[layer]
                heads = projection.input
                projection.input = heads.masked_fill(off[layer].to(heads.device), 0)
    return editor


@contextmanager
def apart() -> Iterator[None]:
    """Run the harness silently and with its own seeds; give the caller's random numbers back.

    Some tasks draw when they prepare their documents, others when they choose examples.
    """
    logger = logging.getLogger("lm_eval")
    level, python, arrays = logger.level, random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), quiet():
        random.seed(SEEDS["python"])
        np.random.seed(SEEDS["numpy"])
        torch.manual_seed(SEEDS["torch"])
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
            random.setstate(python)
            np.random.set_state(arrays)
