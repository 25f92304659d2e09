from collections.abc import Callable
from typing import Any

import pytest

from turngym.agents.codec import Codec

MakeTokenizer = Callable[..., Any]


def metaspace_codec() -> Codec:
    """A SentencePiece-like tokenizer: a blank before the text, bytes for unknown characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    controls = ["<unk>", "<s>", "</s>"]
    pieces = [*controls, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abs</>"]
    vocabulary = {piece: id_ for id_, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in controls])
    return Codec(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def test_text_behind_a_control_token_does_not_begin_with_a_blank() -> None:
    codec = metaspace_codec()
    assert codec.decode(codec.encode("ab").ids) == " ab"
    assert codec.decode(codec.encode_after("</s>", "ab").ids) == "ab"


@pytest.mark.parametrize("text", ["a</s>b", "</s>", "é</s><s> b"])
def test_forged_tokens_are_spelled_out_and_decode_to_the_same_text(text: str) -> None:
    codec = metaspace_codec()
    tokens = codec.encode_after("</s>", text, [(0, len(text))])
    assert not any(map(codec.is_control, tokens.ids))
    assert codec.decode(tokens.ids) == text
    assert tokens.spans[0][0] == 0


def test_genuine_tokens_around_a_forged_one_are_kept() -> None:
    codec = metaspace_codec()
    tokens = codec.encode("<s>a</s>b</s>", [(3, 9)])
    genuine = [codec.decode([id_]) for id_ in tokens.ids if codec.is_control(id_)]
    assert genuine == ["<s>", "</s>"]
    assert codec.decode(tokens.ids) == "<s>a</s>b</s>"


def test_runs_of_blanks_are_not_control_tokens(make_tokenizer: MakeTokenizer) -> None:
    codec = Codec(make_tokenizer(added=("\n\n", "  ", "<x>")))
    tokens = codec.encode("a\n\nb", [(0, 4)])
    assert len(tokens.ids) == 3
    assert set(codec.control) == {"<|im_start|>", "<|im_end|>", "<|bos|>", "<x>"}


def test_pieces_add_up_to_the_text(make_tokenizer: MakeTokenizer) -> None:
    codec = Codec(make_tokenizer())
    text = "a <tool_call>{}</tool_call>\n"
    assert "".join(map(codec.piece, codec.encode(text).ids)) == text
