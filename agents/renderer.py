"""Messages to token ids and sampled ids to actions: the only place where text becomes tokens.

A trajectory grows by appending: the first context, the sampled ids, then only the suffix for what
the environment said. Sampled text is never encoded again. Templates that rewrite history (drop
earlier reasoning, for example) cannot be followed that way; they are found out when the renderer is
built and must be dealt with by an explicit choice.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turngym.agents.codec import Codec, Span, Tokens
from turngym.agents.parsing import Parsed, dialect_of, get_dialect, parse, to_message
from turngym.agents.probing import (
    closing_token,
    find_style,
    generation_prompt,
    rewrites_history,
    starts_in_reasoning,
    takes_json,
)
from turngym.agents.roles import RoleMachine, RoleTracker
from turngym.agents.suffix import SuffixRenderer
from turngym.agents.templating import Template
from turngym.errors import ConfigError, TemplateError
from turngym.types import Action, FinishReason, Message, TokenRole

__all__ = ["OnRewrite", "Piece", "Renderer"]

logger = logging.getLogger(__name__)

Tool = Mapping[str, Any]
OnRewrite = Literal["error", "append", "segments"]


class Piece(NamedTuple):
    """Tokens that were not sampled, and where they came from."""

    ids: NDArray[np.int32]
    """(n,)"""

    role: NDArray[np.int8]
    """`TokenRole` of each, (n,)."""


class Renderer:
    """Renders the dialogues of one model.

    Args:
        tokenizer: Hugging Face fast tokenizer with a chat template.
        dialect: how the model writes tool calls; None = told from the template.
        template_kwargs: extra variables of the template (`enable_thinking`, ...).
        stop_ids: tokens that end a turn besides the template's and the tokenizer's own, as listed
            by the model's generation config.
        on_rewrite: what to do with a template that rewrites history. `error`: refuse it. `append`:
            append all the same; the model then sees its own earlier turns whole, reasoning
            included. `segments`: render the whole dialogue anew for every turn (`start`), one
            training segment a turn.

    Raises:
        ConfigError: an argument is wrong.
        TemplateError: there is no usable chat template, or it rewrites history and `on_rewrite` is
            `error`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        dialect: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
        on_rewrite: OnRewrite = "error",
    ) -> None:
        if on_rewrite not in ("error", "append", "segments"):
            raise ConfigError(
                f"on_rewrite must be 'error', 'append' or 'segments', got {on_rewrite!r}"
            )
        self.codec = Codec(tokenizer)
        self._template = Template(tokenizer, template_kwargs or {}, tuple(self.codec.control))
        self._dialect = get_dialect(dialect or dialect_of(self._template.source))
        prompt = generation_prompt(self._template)
        self._template.takes_json = takes_json(self._template)
        self._stops = self._find_stops(tokenizer, stop_ids)
        self._suffixes = SuffixRenderer(self._template, self.codec, tuple(self._stops))
        self.starts_in_reasoning = starts_in_reasoning(self._suffixes, prompt)
        """The generation prompt opens the reasoning block, so completions start inside it."""

        self._machine = RoleMachine(self._dialect.roles, in_reasoning=self.starts_in_reasoning)
        self._style = find_style(self._template)
        self.rewrites_history = rewrites_history(self._template, self._suffixes, prompt)
        """What the probe found: earlier context changes when later messages come."""

        self.append_only = not self.rewrites_history or on_rewrite == "append"
        """Contexts grow by `extend`; False means `start` is to be called every turn."""

        if self.rewrites_history and on_rewrite == "error":
            raise TemplateError(
                "the chat template rewrites history: earlier turns are rendered differently once "
                "later messages come (most often their reasoning is dropped), so tokens cannot "
                "simply be appended. Choose on_rewrite='append' (the model keeps seeing its "
                "earlier turns whole), on_rewrite='segments' (one training segment a turn), or set "
                "tokenizer.chat_template to a template that keeps them"
            )

    def _find_stops(self, tokenizer: Any, extra: Sequence[int]) -> dict[str, int]:
        """Return the texts and ids of the tokens that end a turn, the template's own first."""
        for stop_id in extra:
            if not 0 <= stop_id < self.codec.vocab_size:
                raise ConfigError(
                    f"stop_ids must lie in 0..{self.codec.vocab_size - 1}, got {stop_id}"
                )
        names = [*self._dialect.stops, tokenizer.eos_token]
        stops = {name: self.codec.control[name] for name in names if name in self.codec.control}
        stops |= {self.codec.decode([stop_id]): int(stop_id) for stop_id in extra}
        closing = closing_token(self._template, self.codec)
        if closing and closing not in self._dialect.not_stops:
            stops = {closing: self.codec.control[closing]} | stops
        if not stops:
            raise TemplateError(
                "neither the chat template nor the tokenizer names a token that ends a turn; set "
                "tokenizer.eos_token or pass stop_ids"
            )
        return stops

    @property
    def dialect(self) -> str:
        """Name of the tool-call dialect."""
        return self._dialect.name

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn; the first is the one demonstrations end with."""
        return tuple(dict.fromkeys(self._stops.values()))

    @property
    def vocab_size(self) -> int:
        """Smallest vocabulary a model needs for these tokens."""
        return self.codec.vocab_size

    def check_vocab(self, model_vocab_size: int) -> None:
        """Check that a model has an embedding for every token.

        Raises:
            ConfigError: its vocabulary is smaller than the tokenizer's; names both sizes.
        """
        self.codec.check_vocab(model_vocab_size)

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Piece:
        """Render a whole context, generation prompt included; every token is PROMPT.

        Args:
            messages: the dialogue so far.
            tools: JSON schemas in OpenAI's shape.

        Raises:
            TemplateError: the template refuses the dialogue.
        """
        plain = [self._plain(message) for message in messages]
        text, outside = self._template.render_marked(plain, tools, prompt=True)
        ids = np.array(self.codec.encode(text, outside).ids, np.int32)
        return Piece(ids, np.full(len(ids), TokenRole.PROMPT, np.int8))

    def extend(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        last_id: int,
    ) -> Piece:
        """Render what follows a completion, the next generation prompt included.

        What the environment said is OBSERVATION, the template's own text GLUE. When the completion
        did not end with a stop token (it was cut off), the template's end token comes first.

        Args:
            history: the dialogue so far, the assistant's message last; names the calls answered.
            new: what the environment said.
            tools: JSON schemas in OpenAI's shape.
            last_id: last sampled token.

        Raises:
            TemplateError: contexts of this template do not grow by appending, or it refuses the
                messages.
        """
        if not self.append_only:
            raise TemplateError(
                "the chat template rewrites history and on_rewrite='segments' was chosen: call "
                "start() with the whole dialogue every turn"
            )
        plain = [self._plain(message) for message in _with_names(history, new)]
        suffix = self._suffixes.render(plain, with_tools=bool(tools))
        tokens = self.codec.encode_after(suffix.end, *suffix.rest)
        ids = [*self._closing_ids(suffix.end, last_id), *tokens.ids]
        role = np.full(len(ids), TokenRole.GLUE, np.int8)
        offset = len(ids) - len(tokens.ids)
        role[offset:][_said_outside(tokens, suffix.rest.outside)] = TokenRole.OBSERVATION
        return Piece(np.array(ids, np.int32), role)

    def _closing_ids(self, end: str, last_id: int) -> list[int]:
        if not end or last_id == self._stops[end]:
            return []
        # A template without end tokens lets the next message's header end the turn: a model that
        # stopped on something else has not written that header.
        is_header = end != next(iter(self._stops)) and end in self._dialect.headers
        return [] if last_id in self.stop_ids and not is_header else [self._stops[end]]

    def read(
        self,
        ids: Sequence[int] | NDArray[np.int32],
        tools: Sequence[Tool] | None = None,
        *,
        finish_reason: FinishReason | None = None,
    ) -> Parsed:
        """Take the sampled ids of one completion apart. Never raises.

        Args:
            ids: sampled ids; the stop token may be among them.
            tools: JSON schemas, for dialects that write values without types.
            finish_reason: None = `stop` when the last id is a stop token, else `length`.
        """
        ids = [int(token_id) for token_id in ids]
        is_stopped = bool(ids) and ids[-1] in self.stop_ids
        return parse(
            self.codec.decode(ids[:-1] if is_stopped else ids),
            self.dialect,
            finish_reason=finish_reason or ("stop" if is_stopped else "length"),
            tools=tools,
            in_reasoning=self.starts_in_reasoning,
        )

    def parse(
        self,
        ids: Sequence[int] | NDArray[np.int32],
        tools: Sequence[Tool] | None = None,
        *,
        finish_reason: FinishReason | None = None,
    ) -> Action:
        """Turn the sampled ids of one completion into an action; see `read`."""
        return to_message(self.read(ids, tools, finish_reason=finish_reason))

    def roles(self, ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int8]:
        """Return REASONING or ACTION for each sampled token of one completion, (n,)."""
        return self._machine.roles(map(self.codec.piece, ids))

    def role_tracker(self) -> RoleTracker:
        """Return an incremental `roles` for one turn; feed it `codec.piece(id)`."""
        return self._machine.start()

    def close_reasoning(
        self, ids: Sequence[int] | NDArray[np.int32], text: str
    ) -> NDArray[np.int32] | None:
        """Return the ids of `text` when a completion breaks off inside a reasoning block.

        Args:
            ids: sampled so far in this turn.
            text: what is to follow, the closing tag included.

        Returns:
            The text's ids, (n,), or None when no reasoning block is open.
        """
        tracker = self.role_tracker()
        for token in ids:
            tracker.push(self.codec.piece(int(token)))
        if not tracker.in_reasoning:
            return None
        return np.asarray(self.codec.encode(text).ids, np.int32)

    def encode_action(self, action: Action) -> NDArray[np.int32]:
        """Write an action in the dialect: the ids of a demonstration, stop token included, (n,)."""
        text = ""
        outside: list[Span] = []
        for segment, is_markup in self._dialect.format(
            action, self._style, self.starts_in_reasoning
        ):
            if segment and not is_markup:
                outside.append((len(text), len(text) + len(segment)))
            text += segment
        end = self._dialect.end(action) if self._dialect.end else None
        stop_id = self._stops.get(end or "", self.stop_ids[0])
        tokens = self.codec.encode_after(next(iter(self._stops)), text, outside)
        return np.array([*tokens.ids, stop_id], np.int32)

    @staticmethod
    def _plain(message: Message) -> dict[str, Any]:
        """Return a message as templates know it: calls that could not be read are text."""
        invalid = message.get("invalid_tool_calls", [])
        plain: dict[str, Any] = {
            key: value
            for key, value in message.items()
            if value is not None and key != "invalid_tool_calls"
        }
        if invalid and isinstance(content := plain.get("content", ""), str):
            texts = [content, *(call["text"] for call in invalid)]
            plain["content"] = "\n".join(text for text in texts if text)
        return plain


def _with_names(history: Sequence[Message], new: Sequence[Message]) -> list[Message]:
    """Name the tool of each result that only carries the id of its call."""
    calls = history[-1].get("tool_calls", []) if history else []
    names = {call["id"]: call["function"]["name"] for call in calls}
    named: list[Message] = []
    for message in new:
        call_id = message.get("tool_call_id", "")
        if message["role"] == "tool" and "name" not in message and call_id in names:
            message = {**message, "name": names[call_id]}
        named.append(message)
    return named


def _said_outside(tokens: Tokens, outside: Sequence[Span]) -> NDArray[np.bool_]:
    said = np.zeros(len(tokens.ids), bool)
    for start, end in outside:
        said |= [a < end and start < b for a, b in tokens.spans]
    return said
