"""A language model seen as attention heads.

`load_model` takes a name, a hub id, a folder or a ``.gguf`` file; `HeadModel` wraps what it finds
in nnsight, looks up where each layer's heads are joined (the input of the attention output
projection), counts the heads in the configuration *and* in the weights, and tries a masked
forward before anyone relies on it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property, reduce
from typing import Any

import torch
import transformers
from nnsight import TransformersModel

from csloc_utils.devices import DTYPES, check_memory, fast_dtype, find_device
from csloc_utils.errors import InputError
from csloc_utils.heads import HeadGrid
from csloc_utils.sources import find_source, load_weights, quiet

# Where the architectures of transformers keep the projection that joins the heads:
# <layer stack>.<layer>.<attention>.<projection>.
_ATTENTION = ("self_attn", "attn", "attn.attention", "attention", "self_attention")
_PROJECTION = ("o_proj", "out_proj", "dense", "c_proj")
_SITE = re.compile(
    rf"(?P<stack>.+)\.(?P<layer>\d+)\.(?P<attention>{'|'.join(map(re.escape, _ATTENTION))})"
    rf"\.(?P<projection>{'|'.join(_PROJECTION)})"
)


class HeadModel:
    """A causal language model whose attention heads can be switched off one by one.

    Parameters
    ----------
    hf : transformers.PreTrainedModel
        The model, on its device and in its dtype. It is left as it is.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    name : str
        What to call it in tables.

    Attributes
    ----------
    nn : nnsight.TransformersModel
        The traced model.
    grid : HeadGrid
        Layers and query heads.
    projections : list of nnsight.Envoy
        Each layer's attention output projection; its *input* holds the heads side by side.
    layers : list of nnsight.Envoy
        The layers that these projections belong to.
    can_start_late : bool
        Whether a forward may begin at a later layer (see `csloc_utils.reuse`).
    unembedding : nnsight.Envoy
        The output head (``lm_head``).

    Raises
    ------
    InputError
        If no output projection is found or its width is not heads × head width, if the model is
        no causal language model, or if a masked forward does not do what it should.
    """

    def __init__(self, hf: Any, tokenizer: Any, name: str = "model") -> None:
        from csloc_utils.checks import starts_late, try_masks  # it runs what is defined here

        check_config(hf.config, name)
        self.hf, self.tokenizer, self.name = hf.eval(), tokenizer, name
        paths = find_projections(hf, name)
        self.grid = head_grid(hf, paths, name)
        if not hasattr(tokenizer, "pad_token_id"):
            raise InputError(f"{name} needs its tokenizer, not {tokenizer!r}: pass one")
        if tokenizer.pad_token_id is None:
            # Padding is masked out everywhere, so any existing token does.
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        self.nn = TransformersModel(hf, tokenizer=tokenizer, task="text-generation")
        self.projections = [_envoy(self.nn, path) for path in paths]
        stack = _SITE.fullmatch(paths[0])["stack"]
        self.layers = [_envoy(self.nn, f"{stack}.{i}") for i in range(len(paths))]
        self.unembedding = _envoy(self.nn, _path_of(hf, hf.get_output_embeddings(), name))
        try_masks(self)
        self.can_start_late = starts_late(self)

    @cached_property
    def cache_argument(self) -> str:
        """What this version of transformers calls the key/value cache."""
        return "cache" if "cache" in self._arguments else "past_key_values"

    @cached_property
    def takes_positions(self) -> bool:
        """Whether the model is told token positions (OPT and ALiBi models derive them)."""
        return "position_ids" in self._arguments

    @cached_property
    def _arguments(self) -> Mapping[str, inspect.Parameter]:
        # The class's forward: nnsight replaces the instance's.
        return inspect.signature(type(self.hf).forward).parameters

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.hf.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.hf.dtype

    @property
    def max_length(self) -> int | None:
        """Longest input in tokens, if the configuration states one."""
        return getattr(self.hf.config.get_text_config(), "max_position_embeddings", None)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """What the numbers depend on: weights, config, dtype, attention, device, versions."""
        return {
            "weights": _hash_weights(self.hf),
            "config": _hash_config(self.hf.config),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": self.hf.config._attn_implementation,
            "device": self.device.type,
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "nnsight": importlib.metadata.version("nnsight"),
        }

    def __repr__(self) -> str:
        g = self.grid
        return (
            f"HeadModel({self.name}: {g.n_layers} layers × {g.n_heads} query heads "
            f"({g.n_kv_heads} kv) of width {g.head_width}, {self.dtype}, {self.device})"
        )


def load_tokenizer(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer alone: cheap, so that a task can be checked before the weights load."""
    source = find_source(name)
    with source.explain_errors():
        return transformers.AutoTokenizer.from_pretrained(
            source.location, trust_remote_code=trust_remote_code
        )


def load_config(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """Load and check the configuration alone: it tells how many heads there will be."""
    source = find_source(name)
    with source.explain_errors():
        config = transformers.AutoConfig.from_pretrained(
            source.location, trust_remote_code=trust_remote_code
        )
    check_config(config, source.name)
    return config


def load_model(
    name: str | os.PathLike[str] = "smollm2-135m-q4",
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    attention: str | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
) -> HeadModel:
    """Load a causal language model and wrap it.

    Parameters
    ----------
    name : str or path
        A name of `csloc models`, a hub id, a folder with a checkpoint, or a ``.gguf`` file (its
        weights are dequantized once and kept in the user's cache).
    dtype : {"auto", "float32", "bfloat16", "float16"}
        "auto" takes bfloat16 where the hardware multiplies it fast, float16 on older GPUs, else
        float32.
    device : str
        A torch device, or "auto": a GPU if there is one.
    device_map : {"auto"}, optional
        Spread the layers over all devices, and over the computer's memory what they cannot hold.
    attention : str, optional
        Attention implementation ("eager", "sdpa", …); transformers chooses when not given.
    tokenizer : optional
        A tokenizer that is already loaded.
    trust_remote_code : bool
        Whether to run Python code that comes with the checkpoint.

    Raises
    ------
    InputError
        If the name, dtype or device is unknown, the architecture is not supported, or the weights
        do not fit into memory (found before they are loaded).
    """
    if dtype not in ("auto", *DTYPES):
        raise InputError(f"unknown dtype {dtype!r}: choose from auto, {', '.join(DTYPES)}")
    where = find_device(device)
    source = find_source(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if device_map not in (None, "auto"):
        raise InputError(f"unknown device map {device_map!r}: give auto, or none and a device")
    config = load_config(name, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    if attention:
        options["attn_implementation"] = attention
    options["dtype"] = DTYPES.get(dtype) or fast_dtype(where)
    check_memory(config, options["dtype"], where, spread=bool(device_map), name=source.name)
    if device_map:
        options["device_map"] = device_map
    with source.explain_errors(), quiet():
        hf = load_weights(source.location, **options)
    return HeadModel(hf if device_map else hf.to(where), tokenizer, source.name)


def check_config(config: Any, name: str) -> None:
    """Raise `InputError` for a model that is no decoder-only language model."""
    if config.is_encoder_decoder:
        raise InputError(
            f"{name} ({config.model_type}) is an encoder-decoder model: "
            "choose a decoder-only language model such as Llama, Qwen or GPT-2"
        )
    text = config.get_text_config()
    if not (getattr(text, "num_attention_heads", None) and getattr(text, "num_hidden_layers", 0)):
        raise InputError(
            f"{name} ({config.model_type}) states no num_attention_heads: csloc needs a "
            "transformer with attention heads in every layer"
        )
    auto = transformers.models.auto.modeling_auto
    # BERT and its like can be built as decoders, but their checkpoints read both ways.
    encoder = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    known = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if (encoder or config.model_type not in known) and not remote:
        raise InputError(
            f"{name} ({config.model_type}) is not a causal language model of transformers: "
            "choose a decoder-only language model such as Llama, Qwen or GPT-2"
        )


def find_projections(hf: Any, name: str = "model") -> list[str]:
    """Return the path of every layer's attention output projection, in layer order.

    Raises
    ------
    InputError
        Naming what was looked for, if not every layer has exactly one.
    """
    n_layers = hf.config.get_text_config().num_hidden_layers
    stacks: dict[str, dict[int, str]] = {}
    for path, module in hf.named_modules():
        site = _SITE.fullmatch(path)
        if site and getattr(module, "weight", None) is not None:
            stacks.setdefault(site["stack"], {})[int(site["layer"])] = path
    complete = [s for s in stacks.values() if sorted(s) == list(range(n_layers))]
    if len(complete) != 1:
        found = {stack: len(layers) for stack, layers in stacks.items()} or "none"
        raise InputError(
            f"{name} ({hf.config.model_type}): no attention output projection in each of its "
            f"{n_layers} layers (looked for <layers>.<i>.({'|'.join(_ATTENTION)})."
            f"({'|'.join(_PROJECTION)}); found {found}): this architecture is not supported"
        )
    return [complete[0][layer] for layer in range(n_layers)]


def promised_grid(config: Any) -> HeadGrid:
    """Return the heads that a configuration promises."""
    config = config.get_text_config()
    n_heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        n_kv = 1  # Falcon-7B states this instead of a count
    else:
        kv_names = ("num_key_value_heads", "num_kv_heads")
        n_kv = next((v for k in kv_names if (v := getattr(config, k, None))), n_heads)
    return HeadGrid(config.num_hidden_layers, n_heads, n_kv, width)


def head_grid(hf: Any, paths: list[str], name: str = "model") -> HeadGrid:
    """Count the heads in the configuration and check the count against the weights' shapes."""
    grid = promised_grid(hf.config)
    n_heads, n_kv, width = grid.n_heads, grid.n_kv_heads, grid.head_width
    for path in paths:
        attention, projection = (hf.get_submodule(p) for p in (path.rpartition(".")[0], path))
        # transformers' Conv1D (GPT-2) stores its weight transposed.
        inputs = projection.weight.shape[0 if hasattr(projection, "nf") else 1]
        if inputs != n_heads * width:
            raise InputError(
                f"{name}: {path} takes {inputs} inputs, but the configuration promises "
                f"{n_heads} heads × {width}: set head_dim and num_attention_heads to match"
            )
        keys = getattr(attention, "k_proj", None)
        if keys is not None and keys.weight.shape[0] != n_kv * width:
            raise InputError(
                f"{name}: {path.rpartition('.')[0]}.k_proj gives {keys.weight.shape[0]} outputs, "
                f"but the configuration promises {n_kv} key/value heads × {width}"
            )
    return grid


def _envoy(nn: Any, path: str) -> Any:
    return reduce(lambda e, n: e[int(n)] if n.isdigit() else getattr(e, n), path.split("."), nn)


def _path_of(hf: Any, wanted: Any, name: str) -> str:
    for path, module in hf.named_modules():
        if module is wanted:
            return path
    raise InputError(f"{name} has no output head (lm_head): csloc needs a causal language model")


def _hash_weights(hf: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(hf.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _hash_config(config: Any) -> str:
    """Identity of what the configuration computes: no names, paths, dtypes and versions."""
    passing = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures")
    kept = {k: v for k, v in config.to_dict().items() if k not in passing and k[0] != "_"}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
