"""Tiny random models of every supported architecture, made from their configs: no download."""

from __future__ import annotations

import functools

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from csloc_utils.models import HeadModel

torch.set_num_threads(1)  # more only get in each other's way on matrices as small as these

WORDS = ["<unk>", "<pad>", *"0 1 2 3 4 5 6 7 8 9 = × + A B C D a b c d e f".split(), "Answer:"]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a word."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>"
    )


_SIZE = dict(
    vocab_size=len(WORDS),
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=1,
    bos_token_id=None,
    eos_token_id=None,
)
_KV = dict(num_key_value_heads=2)
_FALCON = {k: v for k, v in _SIZE.items() if k not in ("intermediate_size",)}
_GPT2 = dict(
    vocab_size=len(WORDS),
    n_embd=48,
    n_layer=3,
    n_head=4,
    n_positions=64,
    bos_token_id=None,
    eos_token_id=None,
)

# name → (config class, options, heads, kv heads, head width)
ARCHITECTURES = {
    "llama": ("LlamaConfig", _SIZE | _KV, 4, 2, 12),
    "llama-mqa": ("LlamaConfig", _SIZE | dict(num_key_value_heads=1), 4, 1, 12),
    "llama-mha": ("LlamaConfig", _SIZE | dict(num_key_value_heads=4), 4, 4, 12),
    "llama-biased": ("LlamaConfig", _SIZE | _KV | dict(attention_bias=True), 4, 2, 12),
    "mistral": ("MistralConfig", _SIZE | _KV | dict(sliding_window=6), 4, 2, 12),
    "qwen2": ("Qwen2Config", _SIZE | _KV, 4, 2, 12),
    "qwen3": ("Qwen3Config", _SIZE | _KV | dict(head_dim=20), 4, 2, 20),
    "gemma2": ("Gemma2Config", _SIZE | _KV | dict(head_dim=16, sliding_window=6), 4, 2, 16),
    "gemma3": (
        "Gemma3TextConfig",
        _SIZE | dict(num_key_value_heads=1, head_dim=256, sliding_window=6),
        4,
        1,
        256,
    ),
    "phi3": ("Phi3Config", _SIZE | _KV, 4, 2, 12),
    "gpt2": ("GPT2Config", _GPT2, 4, 4, 12),
    "neox": ("GPTNeoXConfig", _SIZE, 4, 4, 12),
    "opt": ("OPTConfig", _SIZE | dict(ffn_dim=64, word_embed_proj_dim=48), 4, 4, 12),
    "falcon": ("FalconConfig", _FALCON, 4, 1, 12),
    "falcon-new": (
        "FalconConfig",
        _FALCON | dict(new_decoder_architecture=True, num_kv_heads=2),
        4,
        2,
        12,
    ),
    "olmo2": ("Olmo2Config", _SIZE | _KV, 4, 2, 12),
    "starcoder2": ("Starcoder2Config", _SIZE | _KV, 4, 2, 12),
    "granite": ("GraniteConfig", _SIZE | _KV, 4, 2, 12),
    "cohere": ("CohereConfig", _SIZE | _KV, 4, 2, 12),
}


@functools.cache
def hf_model(name: str, attention: str | None = None) -> transformers.PreTrainedModel:
    """Return a random model of an architecture; the same weights for every attention kind."""
    kind, options, *_ = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**options)
    kwargs = {"attn_implementation": attention} if attention else {}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, **kwargs).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@functools.cache
def head_model(name: str, attention: str | None = None) -> HeadModel:
    """Return the wrapped model; do not change it."""
    import copy

    return HeadModel(copy.deepcopy(hf_model(name, attention)), tokenizer(), name)
