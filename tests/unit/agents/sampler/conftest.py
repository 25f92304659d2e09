from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB = 61
CONTEXT = 192

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON | {"sliding_window": None},
    "mistral-window": _COMMON | {"sliding_window": 6},
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3-odd": _COMMON | {"head_dim": 10, "hidden_size": 36, "intermediate_size": 23},
    "gemma2": _COMMON | {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 2.0},
    "gemma3_text": _COMMON | {"head_dim": 8, "sliding_window": 6, "layer_types": _MIXED},
    "granite": _COMMON | {"logits_scaling": 4.0},
    "cohere": _COMMON | {"logit_scale": 0.25},
    "phi3": _COMMON,
    "gpt_neox": _COMMON,
    "gpt2": {
        "vocab_size": VOCAB,
        "n_positions": CONTEXT,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
"""Configurations of tiny models, by family: `transformers`' own name, up to a dash."""


def build(family: str, **changes: Any) -> nn.Module:
    """Make a tiny model with weights large enough for peaked distributions."""
    config = CONFIG_MAPPING[family.partition("-")[0]](**(FAMILIES[family] | changes))
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


@pytest.fixture
def make_model() -> Callable[..., nn.Module]:
    """Make a tiny model of a family."""
    return build


@pytest.fixture
def make_policy() -> Iterator[Callable[..., Any]]:
    """Make policies that are closed after the test."""
    from turngym.agents.hf_policy import HFPolicy

    made = []

    def make(model: nn.Module, **options: Any) -> HFPolicy:
        policy = HFPolicy(model, **({"max_context": CONTEXT, "threads": 1} | options))
        made.append(policy)
        return policy

    yield make
    for policy in made:
        policy.close()
