"""A complete language model of 0.2 million parameters that learns on a laptop.

It speaks ChatML with Hermes tool calls, so that everything a large model goes through (template,
renderer, parser, sampler, adapters) is exercised by the same code. It knows nothing when built: the
cold start (`turngym.rl.sft`) teaches it the format and the skill of copying.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.errors import ConfigError

__all__ = ["TINY_WORDS", "WIDE_HEADS", "TinyConfig", "build_tiny_agent"]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TINY_WORDS: tuple[str, ...] = (
    *("system\n", "user\n", "assistant\n", "tool\n", "<answer>", "</answer>", "\\boxed{"),
    *('{"name": "', '", "arguments": {"', '": "', '"}}', "calc", "expr", "lookup", "key", "python"),
    *("code", "What is ", " plus ", " minus ", " times ", " then ", " and ", " the ", " is "),
    *("so the answer is", "answer", "error", "value of "),
)
"""Pieces longer than a character; digits stay single so that copying is one token a digit."""

TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user\n' }}{%- endif -%}"
    "<tool_response>{{ m.content }}</tool_response>"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}<|im_end|>{%- endif -%}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}"
    "{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}"
    '<tool_call>{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}<|im_end|>{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Shape of the tiny model (a Qwen3 decoder)."""

    hidden_size: int = 96
    layers: int = 2
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 16
    mlp_size: int = 192
    max_context: int = 1024
    words: tuple[str, ...] = TINY_WORDS
    """Pieces of more than one character that are one token each."""


WIDE_HEADS = TinyConfig(heads=3, kv_heads=3, head_dim=32)
"""A shape that vLLM runs too: its attention on a CPU knows no heads narrower than 32."""


def tiny_tokenizer(words: Sequence[str] = TINY_WORDS) -> Any:
    """Build the tokenizer: 256 bytes, the given words, ChatML and Hermes tags.

    Any text can be encoded and decodes to itself; the split with the fewest pieces is taken.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [piece for word in words for piece, _ in byte_level.pre_tokenize_str(word)]
    # Equal scores make the cheapest split the one with the fewest pieces.
    vocabulary = [(piece, -1.0) for piece in dict.fromkeys([*alphabet, *pieces])]
    backend = Tokenizer(models.Unigram(vocabulary))
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_tiny_agent(
    folder: str | Path, config: TinyConfig | None = None, *, seed: int = 0
) -> Path:
    """Write a fresh tiny model and its tokenizer as a Hugging Face folder.

    Args:
        folder: where to; must not hold another model.
        config: shape; the default has about 200,000 parameters.
        seed: of the initial weights.

    Returns:
        The folder, ready for `load_model` or `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ConfigError: the folder already holds a model.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = config or TinyConfig()
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} already holds a model; choose another folder")
    tokenizer = tiny_tokenizer(config.words)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.mlp_size,
        max_position_embeddings=config.max_context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = {"seed": seed, "parameters": sum(p.numel() for p in model.parameters())}
    (folder / "tiny.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    return folder
