"""A policy behind an OpenAI-style chat server, for evaluation: messages in, messages out.

Its trajectories carry no token columns, so they cannot be trained on. Standard library only.
"""

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from turngym.agents.agent import LimitReachedError
from turngym.agents.base import ActContext
from turngym.agents.threads import BlockingPool
from turngym.errors import ConfigError, EngineError
from turngym.types import Action, InvalidToolCall, Message, ToolCall

__all__ = ["OpenAIPolicy"]

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_CONTEXT_SIGNS = ("context_length_exceeded", "maximum context length", "context length")


class OpenAIPolicy:
    """Asks `POST {base_url}/chat/completions` for the next message.

    Args:
        model: name of the model on the server.
        base_url: address up to and including `/v1`.
        api_key: sent as bearer token; None = the environment variable OPENAI_API_KEY, if set.
        temperature: as the server understands it.
        max_tokens: most tokens of a completion; one cut off there is truncated, never executed.
        timeout_s: seconds a request may take.
        retries: times a request is repeated when the server is busy or cannot be reached, with
            pauses of `pause_s`, twice that, and so on.
        pause_s: first pause, seconds.
        concurrency: most requests at once.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = "https://api.openai.com/v1",
        api_key: str | None = None,
        temperature: float = 1.0,
        max_tokens: int = 1024,
        timeout_s: float = 300.0,
        retries: int = 4,
        pause_s: float = 1.0,
        concurrency: int = 64,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must start with http:// or https://, got {base_url!r}")
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        self._api_key = api_key
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._retries = retries
        self._pause_s = pause_s
        self._pool = BlockingPool(concurrency, name="turngym-openai")

    async def act(self, messages: Sequence[Message], context: ActContext) -> Action:
        """Ask the server for the next message.

        Raises:
            LimitReachedError: the completion was cut off, or the dialogue fills the context.
            ConfigError: the server refuses the request (unknown model, no right to it, ...).
            EngineError: it stays busy or out of reach, or answers nonsense.
        """
        request: dict[str, Any] = {
            "model": self._model,
            "messages": _to_wire(messages),
            "temperature": self._temperature,
            "max_tokens": self._max_tokens,
            "seed": context.rng.getrandbits(31),
        }
        if context.tools:
            request["tools"] = list(context.tools)
        answer = await self._post(json.dumps(request).encode())
        try:
            choice = answer["choices"][0]
            action = _from_wire(choice["message"])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self._url} answered without a message: {answer}"[:500]) from error
        if choice.get("finish_reason") == "length":
            raise LimitReachedError("max_tokens", action)
        return action

    def close(self) -> None:
        """Let the request threads end."""
        self._pool.close()

    async def _post(self, body: bytes) -> Any:
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))
            try:
                # The thread gives up by itself; the limit here only guards against a trickle.
                return await self._pool.call(
                    lambda: self._send(body), timeout_s=2 * self._timeout_s
                )
            except urllib.error.HTTPError as error:
                failure = self._refusal(error)
            except (OSError, ValueError) as error:
                failure = EngineError(f"{self._url}: {type(error).__name__}: {error}")
        raise failure

    def _send(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        key = self._api_key or os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
            return json.loads(response.read())

    def _refusal(self, error: urllib.error.HTTPError) -> EngineError:
        """Raise what will not get better; return what may."""
        with error:
            text = error.read().decode("utf-8", "replace")[:500]
        if error.code in _RETRIED:
            return EngineError(f"{self._url} answered {error.code}: {text}")
        if any(sign in text for sign in _CONTEXT_SIGNS):
            raise LimitReachedError("context_full")
        raise ConfigError(f"{self._url} refused the request with {error.code}: {text}")


def _to_wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Write messages as servers take them.

    Arguments are JSON text there, calls that could not be read are content, and a tool message may
    only answer a call that the message before made: other results come from the user.
    """
    wire: list[dict[str, Any]] = []
    known: set[str] = set()
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            call_id = message.get("tool_call_id", "")
            answer = {"role": "tool", "content": content, "tool_call_id": call_id}
            wire.append(answer if call_id in known else {"role": "user", "content": content})
            continue
        plain: dict[str, Any] = {"role": message["role"], "content": content}
        calls = message.get("tool_calls", [])
        known = {call["id"] for call in calls}
        if calls:
            plain["tool_calls"] = [
                call
                | {
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.dumps(call["function"]["arguments"]),
                    }
                }
                for call in calls
            ]
        if invalid := message.get("invalid_tool_calls"):
            plain["content"] = "\n".join([content, *(call["text"] for call in invalid)]).strip()
        wire.append(plain)
    return wire


def _from_wire(message: Mapping[str, Any]) -> Action:
    """Read a server's message; arguments that are no JSON object are the model's fault."""
    action = Message(role="assistant", content=message.get("content") or "")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        action["reasoning_content"] = reasoning
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        name, written = call["function"]["name"], call["function"].get("arguments") or "{}"
        try:
            arguments = json.loads(written) if isinstance(written, str) else written
            error = None if isinstance(arguments, dict) else "arguments_not_object"
        except ValueError:
            error = "malformed_json"
        if error is None:
            function = {"name": name, "arguments": arguments}
            call_id = call.get("id") or f"call_{index}"
            calls.append({"id": call_id, "type": "function", "function": function})  # type: ignore[typeddict-item]
        else:
            text = f"{name}({written})"
            invalid.append({"text": text, "error": error, "span": (0, len(text)), "index": index})
    if calls:
        action["tool_calls"] = calls
    if invalid:
        action["invalid_tool_calls"] = invalid
    return action
