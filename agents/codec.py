"""Text to ids and back, with a wall between control tokens and text from outside.

Switching special-token parsing off is not enough to keep tool output from becoming control tokens:
many templates use ordinary added tokens (`<tool_call>`), which are matched all the same. Text that
came from outside is therefore encoded by a twin of the tokenizer that has no added tokens at all.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from turngym.errors import ConfigError, TemplateError

__all__ = ["Codec", "Span", "Tokens"]

Span = tuple[int, int]
"""Start and end of a stretch of text, in characters."""


class Tokens(NamedTuple):
    """Encoded text."""

    ids: list[int]
    spans: list[Span]
    """Where each token came from."""


class Codec:
    """A Hugging Face fast tokenizer and its twin.

    Args:
        tokenizer: the fast tokenizer; it is copied, not changed.

    Raises:
        ConfigError: the tokenizer is not a fast one.
        TemplateError: even without added tokens it turns plain text into control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; load it with "
                "AutoTokenizer.from_pretrained(..., use_fast=True)"
            )
        from tokenizers import Tokenizer

        state = json.loads(backend.to_str())
        state.update(truncation=None, padding=None)
        self._plain = Tokenizer.from_str(json.dumps(state))
        added = {token["content"]: token["id"] for token in state["added_tokens"]}
        # Runs of blanks are added tokens in some vocabularies; they control nothing.
        self.control = {text: id_ for text, id_ in added.items() if text.strip(" \t\n\r▁")}
        self._control_ids = frozenset(self.control.values())
        self._twin = Tokenizer.from_str(json.dumps(_without_added_tokens(state)))
        self.vocab_size: int = max(self._plain.get_vocab(with_added_tokens=True).values()) + 1
        self._pieces: dict[int, str] = {}
        self._anchor = self._plain.encode("a", add_special_tokens=False).ids
        self._anchor_text = self.decode(self._anchor)
        self._check_twin()

    def _check_twin(self) -> None:
        unknown = getattr(self._twin.model, "unk_token", None)
        allowed = {self.control[unknown]} if unknown in self.control else set()
        for text in self.control:
            if broken := (self._control_ids - allowed) & set(self._encode_twin(text).ids):
                raise TemplateError(
                    f"the tokenizer turns the plain text {text!r} into control token(s) "
                    f"{sorted(broken)}, so tool output could forge messages; it cannot be used"
                )

    def is_control(self, token_id: int) -> bool:
        """Tell whether an id is a control token: an added token that is not just blanks."""
        return token_id in self._control_ids

    def encode(self, text: str, outside: Sequence[Span] = ()) -> Tokens:
        """Encode text; nothing in the `outside` spans becomes a control token.

        Where no control token is forged the ids are those of the tokenizer itself, so that prompts
        look like the ones the model was trained on.
        """
        encoding = self._plain.encode(text, add_special_tokens=False)
        tokens = Tokens(encoding.ids, encoding.offsets)
        if outside and not self._control_ids.isdisjoint(tokens.ids):
            for token_id, span in zip(*tokens, strict=True):
                if token_id in self._control_ids and _overlaps(_trim(text, span), outside):
                    return self._encode_apart(text, outside)
        return tokens

    def encode_after(self, control: str, text: str, outside: Sequence[Span] = ()) -> Tokens:
        """Encode text that follows a control token, which is not part of the result.

        Some tokenizers put a blank before a text that begins, and some control tokens swallow the
        blanks behind them; spans are relative to `text`.
        """
        if control not in self.control:
            return self.encode(text, outside)
        shift = len(control)
        shifted = [(a + shift, b + shift) for a, b in outside]
        ids, spans = self.encode(control + text, shifted)
        return Tokens(ids[1:], [(a - shift, b - shift) for a, b in spans[1:]])

    def _encode_apart(self, text: str, outside: Sequence[Span]) -> Tokens:
        """Keep the control tokens of the template's own text; encode all between by the twin."""
        result = Tokens([], [])
        done = 0
        for start, end in _complement(outside, len(text)):
            encoding = self._plain.encode(text[start:end], add_special_tokens=False)
            for token_id, (a, b) in zip(encoding.ids, encoding.offsets, strict=True):
                if token_id in self._control_ids:
                    self._extend_plain(result, text, done, start + a)
                    result.ids.append(token_id)
                    result.spans.append((start + a, start + b))
                    done = start + b
        self._extend_plain(result, text, done, len(text))
        return result

    def _extend_plain(self, result: Tokens, text: str, start: int, end: int) -> None:
        if start < end:
            encoding = self._encode_twin(text[start:end])
            result.ids.extend(encoding.ids)
            result.spans.extend((start + a, start + b) for a, b in encoding.offsets)

    def _encode_twin(self, text: str) -> Any:
        return self._twin.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens included; never raises on ids of the vocabulary."""
        text: str = self._plain.decode(list(map(int, ids)), skip_special_tokens=False)
        return text

    def piece(self, token_id: int) -> str:
        """Return what a token adds to the text before it.

        A token that holds part of a character contributes a replacement mark instead.
        """
        token_id = int(token_id)
        if token_id not in self._pieces:
            text = self.decode([*self._anchor, token_id])
            self._pieces[token_id] = text.removeprefix(self._anchor_text)
        return self._pieces[token_id]

    def check_vocab(self, model_vocab_size: int) -> None:
        """Check that a model has a row for every token.

        Raises:
            ConfigError: its vocabulary is smaller than the tokenizer's.
        """
        if model_vocab_size < self.vocab_size:
            raise ConfigError(
                f"the model has {model_vocab_size} token embeddings but the tokenizer writes ids "
                f"up to {self.vocab_size - 1} ({self.vocab_size} tokens); call "
                f"model.resize_token_embeddings({self.vocab_size}) or load the model's own "
                "tokenizer"
            )


def _trim(text: str, span: Span) -> Span:
    """Take off the blanks a token may have swallowed around it."""
    inner = text[span[0] : span[1]]
    start = span[0] + len(inner) - len(inner.lstrip())
    return start, max(start, span[0] + len(inner.rstrip()))


def _overlaps(span: Span, others: Sequence[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in others)


def _complement(spans: Sequence[Span], length: int) -> list[Span]:
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _without_added_tokens(state: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's state that knows no added token, not even as a word of its model."""
    contents = {token["content"] for token in state["added_tokens"]}
    model = dict(state["model"])
    contents.discard(model.get("unk_token"))
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        # Ids must stay, so a word is renamed to one that no text can spell.
        model["vocab"] = {
            (f"\ue000{id_}\ue001" if word in contents else word): id_
            for word, id_ in vocabulary.items()
        }
    elif isinstance(vocabulary, list):
        model["vocab"] = [
            [f"\ue000{id_}\ue001" if word in contents and id_ != model.get("unk_id") else word, s]
            for id_, (word, s) in enumerate(vocabulary)
        ]
    if "merges" in model:
        model["merges"] = [
            merge
            for merge in model["merges"]
            if contents.isdisjoint(parts := _parts(merge)) and "".join(parts) not in contents
        ]
    pre_tokenizer = _continue(state.get("pre_tokenizer"))
    return state | {
        "added_tokens": [],
        "post_processor": None,
        "model": model,
        "pre_tokenizer": pre_tokenizer,
    }


def _parts(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else list(merge)


def _continue(value: Any) -> Any:
    """Put no blank before a stretch that does not begin a text."""
    if isinstance(value, dict):
        fixed = {key: _continue(item) for key, item in value.items()}
        is_first = fixed.get("prepend_scheme") == "first"
        return fixed | ({"prepend_scheme": "never"} if is_first else {})
    if isinstance(value, list):
        return [_continue(item) for item in value]
    return value
