"""vLLM servers by URL: tokens over HTTP, on one server or on several that share the load.

Start one with the command in `START`; every request says all of its sampling settings, because a
server takes what is left unsaid from the model's `generation_config.json`.
"""

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.handover import Handover
from turngym.agents.http_client import HttpClient, RefusedError
from turngym.agents.loop_thread import LoopThread
from turngym.agents.vllm_fleet import Fleet, ServerFaultError
from turngym.errors import EngineError, WeightSyncError

__all__ = ["START", "ServerBackend"]

logger = logging.getLogger(__name__)

START = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m "
    "vllm.entrypoints.openai.api_server --model MODEL --logprobs-mode processed_logprobs "
    "--worker-extension-cls turngym.agents.vllm_worker.WeightWorker"
)
"""How to start a server that can be trained with (adapters: add --enable-lora)."""

_NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""What every request says: no bend in the distribution, and ids instead of text."""

LOAD_WEIGHTS = "turngym_load_weights"
"""Method of our worker extension."""

_CHUNK = 16
"""Tokens of one event of a stream: fewer cost the server more, more are lost when it is cut off."""


@dataclass(slots=True)
class Draft:
    """Tokens of one completion, as far as they have come."""

    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at each place, most likely first."""

    finish_reason: str | None = None
    """`stop`, `length`, or `abort` when `interrupt` cut it off."""

    interrupted: bool = False

    def add(self, choice: dict[str, Any], topk: int) -> None:
        """Take one event of a stream."""
        told = choice["logprobs"]
        self.ids += choice["token_ids"]
        self.logp += told["token_logprobs"]
        if topk:
            for found in told["top_logprobs"]:
                named = [(int(name.removeprefix("token_id:")), p) for name, p in found.items()]
                self.tops.append(sorted(named, key=lambda pair: -pair[1])[:topk])
        self.finish_reason = choice.get("finish_reason")

    def clear(self) -> None:
        """Begin anew, on another server."""
        self.ids, self.logp, self.tops, self.finish_reason = [], [], [], None


class ServerBackend:
    """Samples from vLLM servers and brings them weights. Thread-safe.

    Args:
        urls: addresses of servers of the same model.
        timeout_s: seconds without a token, or for another call, after which a server has failed.
        api_key: bearer token of the servers; None = none.
        folder: where weights are handed over, seen by the servers under the same path; None =
            shared memory, for servers on this machine.
        alpha: scale of adapters, see `Handover.adapter`.

    Raises:
        EngineError: no server can be reached, they serve different models, one is paused, ...
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 120.0,
        api_key: str | None = None,
        folder: Path | None = None,
        alpha: float | None = None,
    ) -> None:
        if not urls:
            raise EngineError("name at least one server")
        self._timeout_s = timeout_s
        self._folder = folder
        self._alpha = alpha
        self._handover: Handover | None = None
        self._run = secrets.token_hex(4)
        self._model = self.model_path = ""
        self.max_context = 0
        self._processed = False
        self._label: str | None = None
        self._adapter: tuple[str, Path] | None = None
        self._drafts: dict[asyncio.Task[Any], Draft] = {}
        self._loop = LoopThread("turngym-vllm-http")
        clients = [HttpClient(url, api_key=api_key) for url in urls]
        self._fleet = Fleet(clients, ready=self._ready, timeout_s=timeout_s)
        try:
            self._loop.call(self._fleet.everywhere(self._meet), 2 * timeout_s)
        except BaseException:
            self.close()
            raise

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        stop_ids: Sequence[int] = (),
        top_p: float = 1.0,
        top_k: int = 0,
        topk: int = 0,
        session: str = "",
    ) -> Draft:
        """Sample one completion with the current weights.

        Args:
            prompt_ids: the whole context.
            temperature: 0 = greedy.
            max_tokens: most tokens; fewer when the context is full.
            seed: makes the draw reproducible, whichever server it falls to.
            stop_ids: sampling ends after one of these, and only then.
            top_p: see `Sampling`.
            top_k: see `Sampling`.
            topk: likeliest tokens recorded with each one.
            session: stays on the server that it began on while that one is healthy.

        Raises:
            EngineError: the servers refuse the request, or none of them answers.
        """
        if temperature not in (0, 1) and not self._processed:
            raise EngineError(
                f"temperature {temperature:g} needs log-probabilities that know of it, and the "
                f"server gives raw ones: start it with --logprobs-mode processed_logprobs ({START})"
            )
        body = {
            "prompt": [int(id) for id in prompt_ids],
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            **_NEUTRAL,
            "ignore_eos": True,
            "stop_token_ids": [int(id) for id in stop_ids],
            "logprobs": topk,
            "stream": True,
            "stream_interval": _CHUNK,
        }
        return await self._loop.on_it(self._complete(body, topk, session))

    async def _complete(self, body: dict[str, Any], topk: int, session: str) -> Draft:
        task = asyncio.current_task()
        assert task is not None
        draft = self._drafts[task] = Draft()
        try:
            await self._fleet.do(
                lambda client: self._sample(client, body, draft, topk), session=session
            )
        except asyncio.CancelledError:
            if not draft.interrupted:
                raise
            draft.finish_reason = "abort"
        finally:
            del self._drafts[task]
        return draft

    async def _sample(
        self, client: HttpClient, body: dict[str, Any], draft: Draft, topk: int
    ) -> None:
        """Fill a draft on one server."""
        draft.clear()
        label = self._label
        named = {"model": self._adapter[0] if self._adapter else self._model}
        salt = {"cache_salt": label} if label is not None else {}
        events = client.events("/v1/completions", named | salt | body, silence_s=self._timeout_s)
        try:
            async with aclosing(events):
                async for event in events:
                    if event["choices"]:
                        draft.add(event["choices"][0], topk)
        except RefusedError as error:
            raise self._explained(error, named["model"]) from error
        except asyncio.CancelledError:
            if draft.interrupted:
                with contextlib.suppress(EngineError):
                    await self._confirm(client, label)
                    raise
                draft.clear()
            raise
        if draft.finish_reason not in ("stop", "length"):
            raise ServerFaultError(f"{client.url} ended a request by {draft.finish_reason!r}")
        await self._confirm(client, label)

    def interrupt(self) -> None:
        """End what is being sampled; `complete` returns the tokens so far, `abort` as reason.

        Blocks until it is so.
        """

        async def stop() -> None:
            tasks = list(self._drafts)
            for task in tasks:
                self._drafts[task].interrupted = True
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._loop.call(stop(), self._timeout_s)

    @property
    def faults(self) -> dict[str, str]:
        """Addresses of the servers that take no requests now, and why."""
        return self._fleet.faults

    def release(self, session: str) -> None:
        """Forget a session. Thread-safe, returns at once."""
        self._loop.post(lambda: self._fleet.release(session))

    def push(self, named: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Bring weights, or adapters, to every server that can be reached; blocks.

        Nothing may be sampled meanwhile (see `interrupt`). Servers out of reach get them when they
        come back (adapters) or with the next update (weights), and take no requests until then.

        Args:
            named: tensors under the trainer's names; those of a peft model are its adapters.
            version: optimizer steps they have seen.

        Raises:
            WeightSyncError: a server refused them, none could be reached, or they could not be
                written. Adapters: the ones before stay in use.
        """
        tensors = dict(named)
        handover = self._handover = self._handover or Handover(self._folder)
        if any(".lora_A." in name for name in tensors):
            self._push_adapter(
                handover.adapter(tensors.items(), version, alpha=self._alpha), version
            )
            return
        label = f"{self._run}-{version}"
        with handover.weights(tensors.items(), version) as path:

            async def load(client: HttpClient) -> None:
                call = {"method": LOAD_WEIGHTS, "args": [str(path)]}
                await client.call("/collective_rpc", call, timeout_s=self._timeout_s)
                await client.call(
                    "/update_weight_version", {"new_version": label}, timeout_s=self._timeout_s
                )

            self._bring(load, version, "VLLM_SERVER_DEV_MODE=1 and our worker extension")
        self._label = label

    def _push_adapter(self, folder: Path, version: int) -> None:
        assert self._handover is not None
        before, name = self._adapter, f"policy-{self._run}@{version}"
        try:
            self._bring(
                lambda client: self._load_adapter(client, name, folder),
                version,
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
            )
        except WeightSyncError:
            self._loop.call(self._unload(name), 2 * self._timeout_s)
            self._handover.drop(folder)
            raise
        self._adapter = (name, folder)
        if before is not None:
            self._loop.call(self._unload(before[0]), 2 * self._timeout_s)
            self._handover.drop(before[1])

    def _bring(
        self, deliver: Callable[[HttpClient], Coroutine[Any, Any, None]], version: int, needs: str
    ) -> None:
        try:
            self._loop.call(self._fleet.everywhere(deliver), 2 * self._timeout_s)
        except RefusedError as error:
            hint = f"; the server needs {needs}: {START}" if error.status in (404, 405) else ""
            raise WeightSyncError(f"version {version} was not taken: {error}{hint}") from error
        except EngineError as error:
            raise WeightSyncError(f"version {version} was not delivered: {error}") from error

    async def _load_adapter(self, client: HttpClient, name: str, folder: Path) -> None:
        asked = {"lora_name": name, "lora_path": str(folder)}
        await client.text("/v1/load_lora_adapter", asked, timeout_s=self._timeout_s)

    async def _unload(self, name: str) -> None:
        """Best effort: an adapter left on a server costs memory, nothing else."""

        async def unload(client: HttpClient) -> None:
            with contextlib.suppress(EngineError):
                await client.text(
                    "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=self._timeout_s
                )

        await self._fleet.reachable(unload)

    async def _meet(self, client: HttpClient) -> None:
        """Learn what a server serves; refuse one that cannot stand in for the others."""
        try:
            listed = await client.call("/v1/models", timeout_s=self._timeout_s)
            card = next(card for card in listed["data"] if not card.get("parent"))
            model, root, room = card["id"], card["root"] or card["id"], int(card["max_model_len"])
        except (RefusedError, KeyError, TypeError, StopIteration) as error:
            raise EngineError(
                f"{client.url} does not list its model as vLLM does: {error}; start one with "
                f"{START}"
            ) from error
        if self._model and (model, root) != (self._model, self.model_path):
            raise EngineError(
                f"{client.url} serves {model!r} ({root}), another server {self._model!r} "
                f"({self.model_path}): servers that share the load must serve one model"
            )
        first = not self._model
        self._model, self.model_path = model, root
        self.max_context = room if first else min(room, self.max_context)
        with contextlib.suppress(RefusedError):  # not a development server: it cannot be paused
            state = await client.call("/is_paused", timeout_s=self._timeout_s)
            if state["is_paused"]:
                raise ServerFaultError(f"{client.url} is paused; POST {client.url}/resume")
        processed = await self._tells_temperature(client)
        self._processed = processed and (first or self._processed)

    async def _tells_temperature(self, client: HttpClient) -> bool:
        """Return whether log-probabilities are those that tokens are drawn from."""
        likeliest: list[float] = []
        for temperature in (1.0, 0.25):
            body = {"model": self._model, "prompt": [0], "max_tokens": 1, "seed": 0, "logprobs": 1}
            body |= {"temperature": temperature, "top_p": 1.0, "top_k": 0, **_NEUTRAL}
            answer = await client.call("/v1/completions", body, timeout_s=self._timeout_s)
            (found,) = answer["choices"][0]["logprobs"]["top_logprobs"]
            likeliest.append(max(found.values()))
        return abs(likeliest[0] - likeliest[1]) > 1e-6

    async def _ready(self, client: HttpClient) -> None:
        """Let a server that failed come back, with the current weights."""
        await self._meet(client)
        if self._adapter is not None:
            listed = await client.call("/v1/models", timeout_s=self._timeout_s)
            if self._adapter[0] not in [card["id"] for card in listed["data"]]:
                await self._load_adapter(client, *self._adapter)
        await self._confirm(client, self._label)

    async def _confirm(self, client: HttpClient, label: str | None) -> None:
        """Raise where a server no longer has the weights that it was given."""
        if label is None:
            return
        told = await client.call("/weight_info", timeout_s=self._timeout_s)
        if told["weight_version"] != label:
            raise ServerFaultError(
                f"{client.url} has weights {told['weight_version']!r} instead of {label!r} (was it "
                "restarted?): it is left out until the next update"
            )

    def _explained(self, error: RefusedError, model: str) -> EngineError:
        """Say what a refusal means."""
        if error.status == 404 and "does not exist" in error.text:
            if self._adapter is not None:
                return ServerFaultError(f"the server lost adapter {model!r}: {error}")
            return EngineError(f"the servers no longer serve {model!r}: {error}")
        if found := re.search(r"[Tt]oken.id\D{0,4}(\d+).*out.of.vocab", error.text):
            return EngineError(
                f"token id {found[1]} is outside the vocabulary of the server's model: does the "
                f"tokenizer belong to {self.model_path}? ({error})"
            )
        if "context length" in error.text:
            return EngineError(f"the prompt does not fit the server's context: {error}")
        return error

    def close(self) -> None:
        """Let go of the servers, which run on; requests in flight fail. Idempotent."""
        with contextlib.suppress(EngineError):
            if self._adapter is not None:
                self._loop.call(self._unload(self._adapter[0]), 5.0)
        self._loop.close()
        if self._handover is not None:
            self._handover.close()
