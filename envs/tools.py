"""Tools: typed functions that a model may call.

    @tool(timeout_s=2)
    def square(number: float) -> float:
        '''Multiply a number by itself.'''
        return number * number

What the model does wrong is an answer it can act on, never an exception: an unknown tool, arguments
that do not fit the schema, a deadline that passed, a `ToolError` (its text is shown as it is), and
any other exception of the tool (shown as `ValueError: ...`), since arguments chosen by the model
caused it. A tool whose *surroundings* fail (a dead server, a lost sandbox, a missing package)
raises `EnvError`, another `TurngymError` or `ImportError`: the episode ends as the world's fault.
"""

import inspect
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, overload

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from turngym.envs.deadline import run_async, run_threaded
from turngym.envs.isolated import Answer, run_isolated
from turngym.envs.schema import check_schema, read_signature, violation
from turngym.errors import ConfigError, EnvError, ToolError, TurngymError
from turngym.rewards.base import ToolResult

__all__ = ["Tool", "cut", "to_text", "tool"]

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_MAX_CHARS = 8192


class _MismatchError(ToolError):
    """An argument that satisfies the schema and yet not the type (a date, a custom validator)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function with a schema, a deadline and an output cap. Make one with `tool`."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""

    fn: Callable[..., Any]
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Wall-clock seconds one call may take, enforced by the caller."""

    isolated: bool = False
    """Run in a process of its own, killed at the deadline."""

    max_chars: int = DEFAULT_MAX_CHARS
    """Longest text shown to the model; the middle of a longer one is cut out and marked."""

    adapters: Mapping[str, TypeAdapter[Any]] = field(default_factory=dict, repr=False)
    is_method: bool = False
    owner: Any = field(default=None, repr=False, compare=False)
    """The environment a method belongs to."""

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "_-." for c in self.name):
            raise ConfigError(
                f"a tool's name may hold letters, digits, '_', '-' and '.', got {self.name!r}"
            )
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ConfigError(
                f"tool {self.name!r}: timeout_s must be positive and finite, got {self.timeout_s}; "
                "every tool has a deadline"
            )
        if self.max_chars < 64:
            raise ConfigError(
                f"tool {self.name!r}: max_chars must be at least 64, got {self.max_chars}"
            )
        if self.parameters.get("type", "object") != "object":
            raise ConfigError(
                f"tool {self.name!r}: its parameters must be a schema of type 'object', "
                f"got {self.parameters.get('type')!r}"
            )
        check_schema(self.parameters, self.parameters)
        if self.isolated and (
            self.is_method
            or inspect.iscoroutinefunction(self.fn)
            or "<locals>" in self.fn.__qualname__
            or self.fn.__module__ == "__main__"
        ):
            raise ConfigError(
                f"tool {self.name!r}: an isolated tool is imported by name in another process, so "
                "it must be a plain function at the top of a module that can be imported"
            )

    @classmethod
    def from_schema(
        cls,
        schema: Mapping[str, Any],
        fn: Callable[..., Any],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_chars: int = DEFAULT_MAX_CHARS,
    ) -> "Tool":
        """Make a tool from a JSON schema instead of type hints.

        Args:
            schema: `{"name", "description", "parameters"}`, or OpenAI's
                `{"type": "function", "function": {...}}` around it.
            fn: called with the arguments by name, as plain JSON values.
            timeout_s: wall-clock seconds one call may take.
            max_chars: longest text shown to the model.

        Raises:
            ConfigError: the schema has no name, or its parameters are no object.
        """
        inner = schema.get("function", schema)
        if not isinstance(inner.get("name"), str):
            raise ConfigError(f"a tool's schema needs a 'name', got keys {sorted(inner)}")
        return cls(
            name=inner["name"],
            description=inner.get("description", ""),
            parameters=inner.get("parameters", {"type": "object", "properties": {}}),
            fn=fn,
            timeout_s=timeout_s,
            max_chars=max_chars,
        )

    def __get__(self, instance: Any, owner: Any = None) -> "Tool":
        if instance is None or not self.is_method:
            return self
        return replace(self, owner=instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself: no validation, no deadline."""
        return self._function()(*args, **kwargs)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI-style servers take it; a fresh copy."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        copy: dict[str, Any] = json.loads(json.dumps({"type": "function", "function": function}))
        return copy

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Validate the arguments, run the tool under its deadline, and turn the value into text.

        Raises:
            EnvError: the tool's surroundings failed, or too many calls hang.
        """
        kind, value, text = self._answer(arguments)
        return ToolResult(
            name=self.name,
            arguments=arguments,
            value=value,
            error=None if kind == "value" else kind,
            text=text,
        )

    def _answer(self, arguments: Mapping[str, Any]) -> Answer:
        if problem := violation(self.parameters, arguments):
            return "schema_mismatch", None, problem
        try:
            if self.isolated:
                answer = run_isolated(
                    self.fn.__module__, self.fn.__qualname__, arguments, self.timeout_s
                )
            elif inspect.iscoroutinefunction(self.fn):
                answer = run_async(lambda: self._run_async(arguments), self.timeout_s)
            else:
                answer = run_threaded(lambda: self.run_here(arguments), self.timeout_s)
        except TimeoutError:
            return "timeout", None, f"tool {self.name!r} timed out after {self.timeout_s:g} s"
        kind, cause, text = answer
        if kind == "env_error":
            if isinstance(cause, ConfigError):
                raise cause
            raise EnvError(f"tool {self.name!r}: {text}") from cause
        return answer

    def run_here(self, arguments: Mapping[str, Any]) -> Answer:
        """Run on this thread, without a deadline; never raises an ordinary exception."""
        try:
            value = self._function()(**self._coerced(arguments))
            return self._rendered(value)
        except BaseException as error:
            return self._failed(error)

    async def _run_async(self, arguments: Mapping[str, Any]) -> Answer:
        try:
            result: Awaitable[Any] = self._function()(**self._coerced(arguments))
            return self._rendered(await result)
        except Exception as error:
            return self._failed(error)

    def _function(self) -> Callable[..., Any]:
        if not self.is_method:
            return self.fn
        if self.owner is None:
            raise ConfigError(f"tool {self.name!r} is a method: call it on an environment")
        bound: Callable[..., Any] = self.fn.__get__(self.owner)
        return bound

    def _coerced(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        coerced = dict(arguments)
        for name in (name for name in arguments if name in self.adapters):
            try:
                coerced[name] = self.adapters[name].validate_python(arguments[name])
            except ValidationError as error:
                first = error.errors()[0]
                path = "".join(f".{part}" for part in (name, *first["loc"]))[1:]
                raise _MismatchError(f"argument {path!r}: {first['msg']}") from error
        return coerced

    def _rendered(self, value: Any) -> Answer:
        text, complete = _render(value, self.max_chars)
        # A value that was too long to show is not kept either: records live as long as a run.
        return "value", value if complete else text, text

    def _failed(self, error: BaseException) -> Answer:
        if isinstance(error, ToolError):
            kind = "schema_mismatch" if isinstance(error, _MismatchError) else "tool_error"
            return kind, None, to_text(str(error), self.max_chars)
        if isinstance(error, (TurngymError, ImportError)):
            return "env_error", error, str(error)
        try:
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
        except Exception:
            text = type(error).__name__
        return "tool_error", None, to_text(text, self.max_chars)


@overload
def tool(fn: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    timeout_s: float = ...,
    isolated: bool = ...,
    name: str | None = ...,
    description: str | None = ...,
    max_chars: int = ...,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    isolated: bool = False,
    name: str | None = None,
    description: str | None = None,
    max_chars: int = DEFAULT_MAX_CHARS,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a typed function, an async function, or a method of an environment.

    Schema and validation come from the type hints, descriptions from the Google-style docstring.

    Args:
        fn: the function, when used bare (`@tool`).
        timeout_s: wall-clock seconds one call may take. A thread that outlives it is abandoned.
        isolated: run in a process of its own, killed at the deadline; for plain functions only.
        name: what the model calls it; defaults to the function's name.
        description: what the model reads; defaults to the docstring up to its first section.
        max_chars: longest text shown to the model.

    Raises:
        ConfigError: a parameter without a type hint, a docstring that describes something else, a
            deadline that is not positive.
    """

    def make(function: Callable[..., Any]) -> Tool:
        signature = read_signature(function)
        return Tool(
            name=name or function.__name__,
            description=signature.description if description is None else description,
            parameters=signature.parameters,
            fn=function,
            timeout_s=timeout_s,
            isolated=isolated,
            max_chars=max_chars,
            adapters=signature.adapters,
            is_method=signature.is_method,
        )

    return make if fn is None else make(fn)


def cut(text: str, max_chars: int, *, missing: int = 0) -> str:
    r"""Keep head and tail of a long text and say how much is missing between them.

    Args:
        text: any text.
        max_chars: longest text returned.
        missing: characters of the middle that were dropped already.

    >>> cut("a" * 50 + "b" * 50, 64)
    'aaaaaaaaaaaa\n[... 76 characters cut ...]\nbbbbbbbbbbbb'
    """
    if len(text) <= max_chars:
        return text
    half = (max_chars - 40) // 2
    gone = len(text) + missing - 2 * half
    return f"{text[:half]}\n[... {gone} characters cut ...]\n{text[-half:]}"


def to_text(value: Any, max_chars: int = DEFAULT_MAX_CHARS) -> str:
    """Return what the model is shown of a tool's value: text as it is, anything else as JSON.

    >>> to_text({"a": [1, None]})
    '{"a": [1, null]}'
    """
    return _render(value, max_chars)[0]


def _render(value: Any, max_chars: int) -> tuple[str, bool]:
    """Return the text of a value and whether it is complete."""
    if isinstance(value, bytes):
        # Enough bytes for every character that is kept, whatever their length in UTF-8.
        keep = 4 * max_chars
        if len(value) > 2 * keep:
            value = value[:keep] + b" ... " + value[-keep:]
        value = value.decode(errors="replace")
    if isinstance(value, str):
        text, complete = cut(value, max_chars), len(value) <= max_chars
    else:
        text, complete = _json_text(value, max_chars)
    # Lone surrogates are no text: a tokenizer or a file would refuse them.
    text = text if text.isascii() else text.encode(errors="replace").decode()
    return text or "(no output)", complete


def _json_text(value: Any, max_chars: int) -> tuple[str, bool]:
    """Encode piece by piece, so that a huge value never exists as one huge text."""
    encoder = json.JSONEncoder(ensure_ascii=False, default=_plain)
    head: list[str] = []
    tail: deque[str] = deque()
    head_chars = tail_chars = dropped = 0
    for piece in encoder.iterencode(value):
        if head_chars <= max_chars:
            head.append(piece)
            head_chars += len(piece)
            continue
        tail.append(piece)
        tail_chars += len(piece)
        while tail_chars - len(tail[0]) > max_chars:
            gone = len(tail.popleft())
            tail_chars -= gone
            dropped += gone
    text = "".join(head) + "".join(tail)
    return cut(text, max_chars, missing=dropped), len(text) + dropped <= max_chars


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return to_jsonable_python(value, fallback=repr)
