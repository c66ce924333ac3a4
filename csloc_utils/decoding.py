"""The loop of batched decoding: which rows wait, which run, and what they have written.

`csloc_utils.generation.generate` is the way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch
from transformers.cache_utils import Cache, DynamicLayer

from csloc_utils.ablation import Ablation, forward
from csloc_utils.devices import out_of_memory
from csloc_utils.errors import InputError
from csloc_utils.models import HeadModel
from csloc_utils.rows import RowTable
from csloc_utils.shared_prefix import Prefixes, can_share

# More rows keep the arithmetic units no busier.
_BUSY_ROWS = {"cpu": 128, "cuda": 1024}
# New tokens in one forward that reads prompts.
_READ_TOKENS = {"cpu": 1024, "cuda": 32768}
_MEMORY_SHARE = 0.4
# A shorter prefix costs more to share than to repeat.
_WORTH_SHARING = 8
# Waiting rows are read in when this share of the places is free: one by one would be slow.
_REFILL = 1 / 8


@dataclass
class Row:
    """One item under one mask."""

    mask: int
    prompt: list[int]  # without the shared prefix
    new: list[int] = field(default_factory=list)
    text: str = ""
    ending: str = ""


class Run:
    """One call of `generate`: which rows wait, which run, and what they have written."""

    def __init__(
        self,
        model: HeadModel,
        prompts: list[list[int]],
        masks: np.ndarray,
        ablation: Ablation,
        max_new_tokens: int,
        stop: tuple[str, ...],
        batch_rows: int | None,
        bar: Any,
    ) -> None:
        self.model, self.masks, self.ablation = model, masks, ablation
        self.max_new_tokens, self.stop, self.bar = max_new_tokens, stop, bar
        self.ends = _end_tokens(model)
        self.prefix = prompts[0][: _prefix_length(prompts)]
        own = [prompt[len(self.prefix) :] for prompt in prompts]
        self.longest = max(map(len, own))
        self.rows = [Row(mask, ids) for mask in range(len(masks)) for ids in own]
        self.shares = bool(self.prefix) and can_share(model, self.room + len(self.prefix))
        self.batch_rows = min(batch_rows or self._fitting_rows(), len(self.rows))

    @property
    def room(self) -> int:
        """Columns that the longest row can come to need after the prefix."""
        return self.longest + self.max_new_tokens

    def finish(self) -> list[Row]:
        """Decode all rows to their ends; with half as many at once when memory runs out."""
        while waiting := [row for row in self.rows if not row.ending]:
            try:
                self._decode(waiting)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                if self.batch_rows == 1:
                    raise InputError(
                        "a single text does not fit into memory: shorten the prompts or "
                        "max_new_tokens"
                    ) from error
                error.__traceback__ = None  # it holds the tensors that did not fit
                self.batch_rows = (self.batch_rows + 1) // 2
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        return self.rows

    def _decode(self, waiting: list[Row]) -> None:
        grid, before = self.model.grid, len(self.prefix)
        # Rows that were interrupted are read in again with what they had written.
        copied = 0 if self.shares else before
        begin = copied + max(len(row.prompt) + len(row.new) for row in waiting)
        columns = copied + self.room + min(self.max_new_tokens, 64)
        table = RowTable(
            grid.n_layers, self.batch_rows, columns, begin, before if self.shares else 0
        )
        prefixes, running = Prefixes(before), []
        while waiting or running:
            free = self.batch_rows - len(running)
            if waiting and (not running or free >= max(1, int(_REFILL * self.batch_rows))):
                fresh, waiting = waiting[:free], waiting[free:]
                running = self._read(fresh, running, table, prefixes)
                continue
            running = self._keep(running, self._step(running, table, prefixes), table)
            prefixes.keep({row.mask for row in running + waiting[:1]})

    def _read(
        self, fresh: list[Row], running: list[Row], table: RowTable, prefixes: Prefixes
    ) -> list[Row]:
        """Run the prompts of new rows, and the shared prefix of masks that had no row so far."""
        before = len(self.prefix)
        budget = _READ_TOKENS.get(self.model.device.type, _READ_TOKENS["cpu"])
        missing = sorted({row.mask for row in fresh} - set(prefixes.names)) if before else []
        for names in _split(missing, max(1, budget // max(1, before))):
            ids = torch.tensor([self.prefix] * len(names))
            cache = Cache(layer_class_to_replicate=DynamicLayer)  # no layer forgets what it read
            self._forward(ids, torch.ones_like(ids), names, [before - 1] * len(names), cache)
            prefixes.add(names, cache.layers)
        # Prompts of a length are read together: padding costs as much as text.
        fresh = sorted(fresh, key=lambda row: len(row.prompt) + len(row.new))
        for part in _split(fresh, self._rows_per_read()):
            texts = [row.prompt + row.new for row in part]
            lengths, longest = list(map(len, texts)), max(map(len, texts))
            # Padding on the right, where no real token sees it: exact with sliding windows too.
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
            real = torch.arange(before + longest) < torch.tensor(lengths)[:, None] + before
            names = [row.mask for row in part]
            cache = prefixes.expand(names)
            last = [length - 1 for length in lengths]
            tokens = self._forward(ids, real.long(), names, last, cache)
            copied = 0 if self.shares else before
            table.add(cache.layers, before - copied, [copied + length for length in lengths])
            running = self._keep(running + part, [None] * len(running) + tokens, table)
        return running

    def _step(self, running: list[Row], table: RowTable, prefixes: Prefixes) -> list[int]:
        """Write one token in every running row."""
        ids = torch.tensor([row.new[-1:] for row in running])
        names, last = [row.mask for row in running], [0] * len(running)
        arguments = ids, table.attention_mask(), names, last, table.cache
        if self.shares:
            with prefixes.attended(self.model, names):
                tokens = self._forward(*arguments)
        else:
            tokens = self._forward(*arguments)
        table.advance()
        return tokens

    def _forward(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        names: Sequence[int],
        last: Sequence[int],
        cache: Cache,
    ) -> list[int]:
        """Run one forward, and return the best next token after position `last` of each row."""
        masks, places = self.masks[list(names)], torch.tensor(last)[:, None]
        run = forward(self.model, ids, attention_mask, masks, self.ablation, places, cache=cache)
        best, tokens = run.logits[:, 0].max(-1)
        if not torch.isfinite(best).all():
            remedy = "check the weights" if best.dtype == torch.float32 else "try --dtype float32"
            raise InputError(
                f"the model returned logits that are not finite in {best.dtype}: {remedy}"
            )
        return tokens.tolist()

    def _keep(self, running: list[Row], tokens: Sequence[int | None], table: RowTable) -> list[Row]:
        """Note each row's new token (None: it has none yet), and take out the rows that ended."""
        for row, token in zip(running, tokens, strict=True):
            if token is not None:
                row.new.append(token)
                self._end(row)
        running = list(running)
        for place in reversed(range(len(running))):
            if running[place].ending:
                table.remove(place)
                running[place] = running[-1]
                running.pop()
                self.bar.update()
        return running

    def _end(self, row: Row) -> None:
        """Say how a row has ended, if it has."""
        if self.stop and self._stopped(row):
            row.ending = "stop"
        elif row.new[-1] in self.ends:
            row.ending = "eos"
        elif len(row.new) == self.max_new_tokens:
            row.ending = "length"
        if row.ending:
            row.text = self._text(row.new)
            if row.ending == "stop":
                row.text = row.text[: _first(row.text, self.stop)]

    def _stopped(self, row: Row) -> bool:
        # A token may end anywhere in a stop string. The last tokens tell cheaply whether to look
        # closer: one character can take a token a byte, and a torn one at the border is lost.
        tail = row.new[-(max(len(s.encode()) for s in self.stop) + 8) :]
        if _first(self._text(tail), self.stop) is None:
            return False
        return _first(self._text(row.new), self.stop) is not None

    def _text(self, ids: list[int]) -> str:
        return self.model.tokenizer.decode(ids, skip_special_tokens=True)

    def _token_bytes(self) -> int:
        """Size of one token's keys and values."""
        grid = self.model.grid
        return 2 * grid.n_layers * grid.n_kv_heads * grid.head_width * self.model.dtype.itemsize

    def _fitting_rows(self) -> int:
        """Choose how many rows decode together from free memory and the size of a row."""
        kind = self.model.device.type
        vocabulary = self.model.hf.config.get_text_config().vocab_size
        own = self.room + min(self.max_new_tokens, 64)
        shared = len(self.prefix) / (len(self.rows) // len(self.masks) if self.shares else 1)
        row = self._token_bytes() * (own + shared) + vocabulary * (self.model.dtype.itemsize + 4)
        fits = int(_MEMORY_SHARE * _free_memory(self.model.device) / row)
        return max(1, min(fits, _BUSY_ROWS.get(kind, _BUSY_ROWS["cpu"])))

    def _rows_per_read(self) -> int:
        """Choose how many prompts are read in one forward, in which each holds its own prefix."""
        kind = self.model.device.type
        busy = _READ_TOKENS.get(kind, _READ_TOKENS["cpu"]) // self.longest
        columns = _MEMORY_SHARE / 4 * _free_memory(self.model.device) / self._token_bytes()
        return max(1, min(busy, int(columns / (len(self.prefix) + self.longest))))


def _prefix_length(prompts: list[list[int]]) -> int:
    """Return how many leading tokens all prompts share, if running them once pays."""
    if len(prompts) == 1:
        return 0
    least, most = min(prompts), max(prompts)  # whatever these two share, all share
    shared = next((i for i, (a, b) in enumerate(zip(least, most)) if a != b), len(least))
    shared = min(shared, min(map(len, prompts)) - 1)  # every row keeps a token of its own
    return shared if shared >= _WORTH_SHARING else 0


def _end_tokens(model: HeadModel) -> set[int]:
    config = getattr(model.hf, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        ends = model.tokenizer.eos_token_id
    return set(np.atleast_1d(ends).tolist()) if ends is not None else set()


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _first(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first stop string begins."""
    return min((place for s in stop if (place := text.find(s)) >= 0), default=None)


def _split(rows: Sequence[Any], size: int) -> list[Any]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]
