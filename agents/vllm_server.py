"""vLLM servers by URL: tokens over HTTP, on one server or on several that share the load.

Start one with the command in `vllm_delivery.START`. Every request says all of its sampling
settings, because a server takes what is left unsaid from the model's `generation_config.json`.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turngym.agents.config import EngineConfig
from turngym.agents.http_client import HttpClient, RefusedError
from turngym.agents.loop_thread import LoopThread
from turngym.agents.vllm_backend import EngineSpec, Sample, SampleRequest
from turngym.agents.vllm_delivery import START, Current, Delivery
from turngym.agents.vllm_fleet import Fleet, ServerFaultError
from turngym.agents.vllm_transfer import GpuTransfer, ServerControl
from turngym.errors import ConfigError, EngineError, WeightSyncError

__all__ = ["Draft", "ServerBackend"]

logger = logging.getLogger(__name__)

_NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""What every request says: no bend in the distribution, and ids instead of text."""

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
    """`stop` or `length`, once there is nothing to come."""

    is_interrupted: bool = False

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

    def sample(self, version: int, topk: int) -> Sample:
        """Return what there is."""
        ids = [[id for id, _ in top] for top in self.tops]
        logp = [[p for _, p in top] for top in self.tops]
        return Sample(
            ids=np.array(self.ids, np.int32),
            logp=np.array(self.logp, np.float32),
            finish_reason="stop"
            if self.finish_reason == "stop"
            else "length"
            if self.finish_reason
            else "abort",
            version=version,
            topk_ids=np.array(ids, np.int32).reshape(-1, topk) if topk else None,
            topk_logp=np.array(logp, np.float32).reshape(-1, topk) if topk else None,
        )


class ServerBackend:
    """Samples from vLLM servers and brings them weights; a `Backend`.

    Args:
        engine: addresses of servers of one model, and how weights travel. `timeout_s` is what a
            server may take for a call, or between two tokens.
        spec: what the trainer expects of them; None = nothing.
        api_key: bearer token of the servers; None = the environment variable VLLM_API_KEY, if set.

    Raises:
        ConfigError: the servers cannot do what is asked, or serve another model than the trainer's.
        EngineError: none can be reached, they serve different models, one is paused, ...
    """

    def __init__(
        self,
        engine: EngineConfig,
        spec: EngineSpec | None = None,
        *,
        api_key: str | None = None,
    ) -> None:
        if not engine.urls:
            raise ConfigError("engine.urls names no server")
        if spec is not None and spec.deterministic:
            raise ConfigError("deterministic runs sample in process; leave out engine.urls")
        self._timeout_s = engine.timeout_s
        self._model = self.model_path = ""
        self._max_context = (spec and spec.max_context) or 1 << 62
        self._vocab = 0
        self._count = len(engine.urls)
        dtype = engine.dtype if engine.dtype != "auto" or spec is None else spec.dtype
        self._tolerance = 1e-3 if dtype == "float32" else 0.2
        self._is_closed = False
        self._processed = False
        self._drafts: dict[asyncio.Task[Any], Draft] = {}
        self._loop = LoopThread("turngym-vllm-http")
        key = api_key or os.environ.get("VLLM_API_KEY")
        clients = [HttpClient(url, api_key=key) for url in engine.urls]
        self._fleet = Fleet(clients, ready=self._ready, timeout_s=engine.timeout_s)
        transfer = None
        if engine.transfer != "file":
            control = ServerControl(self.everywhere, timeout_s=engine.timeout_s)
            transfer = GpuTransfer(engine.transfer, control, timeout_s=engine.timeout_s)
        self._delivery = Delivery(
            self.everywhere,
            timeout_s=engine.timeout_s,
            folder=engine.folder,
            spec=spec,
            transfer=transfer,
        )
        try:
            self.everywhere(self._meet)
            self._vocab = self._loop.call(self._fleet.do(self._count_ids), 2 * engine.timeout_s)
            if spec is not None:
                self._check_model(spec.model_path)
        except BaseException:
            self.close()
            raise

    @property
    def max_context(self) -> int:
        """Most tokens a context may hold, completion included."""
        return self._max_context

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self._vocab

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._delivery.current.version

    def submit(self, request: SampleRequest) -> "Future[Sample]":
        """Have a server sample; the answer does not depend on which. See `Backend.submit`."""
        return self._loop.submit(self._complete(request))

    async def _complete(self, request: SampleRequest) -> Sample:
        task = asyncio.current_task()
        assert task is not None
        draft = self._drafts[task] = Draft()
        wanted, topk = self._delivery.current, request.topk
        if wanted.version != request.version:
            raise WeightSyncError(
                f"policy version {request.version} was asked for, the servers have version "
                f"{wanted.version}"
            )
        body = self._body(request)
        try:
            await self._fleet.do(
                lambda client: self._sample(client, body, wanted, draft, topk),
                session=request.session,
            )
        except asyncio.CancelledError:
            if self._is_closed:
                raise EngineError("the connection to the servers was closed") from None
            if not draft.is_interrupted:
                raise
        finally:
            del self._drafts[task]
        return draft.sample(wanted.version, topk)

    def _body(self, request: SampleRequest) -> dict[str, Any]:
        sampling = request.sampling
        if sampling.temperature not in (0, 1) and not self._processed:
            raise EngineError(
                f"temperature {sampling.temperature:g} needs log-probabilities that know of it, "
                "and a server gives raw ones: start it with --logprobs-mode processed_logprobs "
                f"({START})"
            )
        return {
            "prompt": [int(id) for id in request.ids],
            "max_tokens": sampling.max_tokens,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            **_NEUTRAL,
            "ignore_eos": True,
            "stop_token_ids": [int(id) for id in sampling.stop_ids],
            "logprobs": request.topk,
            "stream": True,
            "stream_interval": _CHUNK,
        }

    async def _sample(
        self,
        client: HttpClient,
        body: dict[str, Any],
        wanted: Current,
        draft: Draft,
        topk: int,
    ) -> None:
        """Fill a draft on one server."""
        draft.clear()
        fields = wanted.fields(self._model)
        events = client.events("/v1/completions", fields | body, silence_s=self._timeout_s)
        try:
            async with aclosing(events):
                async for event in events:
                    if event["choices"]:
                        draft.add(event["choices"][0], topk)
            if draft.finish_reason not in ("stop", "length"):
                raise ServerFaultError(f"{client.url} ended a request by {draft.finish_reason!r}")
            await self._delivery.confirm(client, wanted)
        except asyncio.CancelledError:
            if draft.is_interrupted:
                try:
                    await self._delivery.confirm(client, wanted)
                except EngineError:
                    draft.clear()
            raise
        except EngineError as error:
            draft.clear()
            if isinstance(error, RefusedError):
                raise self._explained(error, fields["model"]) from error
            raise

    def interrupt(self) -> None:
        """Give back what is being sampled, with the tokens that have come; see `Backend`."""

        def stop() -> None:
            for task, draft in self._drafts.items():
                draft.is_interrupted = True
                task.cancel()

        self._loop.post(stop)

    @property
    def faults(self) -> dict[str, str]:
        """Addresses of the servers that take no requests now, and why."""
        return self._fleet.faults

    def release(self, session: str) -> None:
        """Forget a session. Returns at once."""
        self._loop.post(lambda: self._fleet.release(session))

    def load(self, named: Sequence[tuple[str, Any]], *, version: int) -> None:
        """Bring weights, or adapters, to every server that can be reached; see `Backend.load`.

        Servers out of reach get them when they
        come back (adapters) or with the next update (weights), and take no requests until then.

        Args:
            named: tensors under the trainer's names; those of a peft model are its adapters.
            version: optimizer steps they have seen.

        Raises:
            WeightSyncError: a server refused them, none could be reached, or they could not be
                written. Adapters: the ones before stay in use.
        """
        self._delivery.bring(named, version=version)
        if self._count > 1:
            self._delivery.compare(self._model, tolerance=self._tolerance)

    def everywhere(
        self, work: Callable[[HttpClient], Awaitable[None]], *, heals: bool = False
    ) -> None:
        """Do something on all servers and wait; see `Fleet.everywhere`."""
        self._loop.call(self._fleet.everywhere(work, heals=heals), 2 * self._timeout_s)

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
        self._max_context = min(room, self._max_context)
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

    async def _count_ids(self, client: HttpClient) -> int:
        """Return the size of the vocabulary, which a server only tells when it refuses an id."""
        body = {"model": self._model, "prompt": [0], "max_tokens": 1, "stop_token_ids": [1 << 30]}
        try:
            await client.call("/v1/completions", body, timeout_s=self._timeout_s)
        except RefusedError as error:
            if found := re.search(r"[Vv]ocab\w* size\D{0,3}(\d+)", error.text):
                return int(found[1])
            raise
        raise EngineError(f"{client.url} takes token ids that no vocabulary has; is it vLLM?")

    def _check_model(self, folder: Path) -> None:
        """Refuse servers whose model has other token ids than the trainer's."""
        if (config := folder / "config.json").is_file():
            vocab = json.loads(config.read_text(encoding="utf-8")).get("vocab_size", self._vocab)
            if vocab != self._vocab:
                raise ConfigError(
                    f"the servers' model {self.model_path} has {self._vocab} token ids, {folder} "
                    f"has {vocab}: start the servers with the model that trains"
                )

    async def _ready(self, client: HttpClient) -> None:
        """Let a server that failed come back, with the current weights."""
        await self._meet(client)
        await self._delivery.restore(client)

    def _explained(self, error: RefusedError, model: str) -> EngineError:
        """Say what a refusal means."""
        if error.status == 404 and "does not exist" in error.text:
            if self._delivery.current.adapter is not None:
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
        if not self._is_closed:
            self._is_closed = True
            self._delivery.close()
            self._loop.close()
