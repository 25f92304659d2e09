from collections.abc import Callable
from typing import Any

import pytest

MakeTokenizer = Callable[..., Any]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    template: str = CHATML,
    *,
    added: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    eos: str = "<|im_end|>",
) -> Any:
    """One token a byte, three special tokens, and ordinary added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = dict.fromkeys(["<|im_start|>", "<|im_end|>", "<|bos|>", eos])
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    return byte_tokenizer
