"""A local server that speaks the part of vLLM's HTTP that turngym uses, with faults on demand.

Its model is a table: the next token depends on the last one alone, so what it should answer can be
written down. Weights and adapters are real files, sampling is seeded, answers have vLLM's shape and
its errors vLLM's words (0.32).
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from safetensors.numpy import load_file

VOCAB = 16
ADAPTED = "table"
"""The one parameter; its adapter is `base_model.model.table.lora_{A,B}.weight`."""

TRANSFER = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
)

Fault = Callable[[web.Request], "web.StreamResponse | None"]


def make_table(seed: int, vocab: int = VOCAB) -> NDArray[np.float32]:
    """Logits of the next token by the last one, (vocab, vocab)."""
    return np.random.default_rng(seed).normal(0, 1.5, (vocab, vocab)).astype(np.float32)


def log_softmax(logits: NDArray[np.float32], temperature: float = 1.0) -> NDArray[np.float64]:
    """Over the last axis."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return result


class FakeVLLM:
    """The fake. `faults[route]` are callables taken one at a time by the next calls of the route.

    Attributes:
        seen: bodies of completion requests, in order.
        calls: how often each route was asked.
        running: completions being sampled now.
        transfers: calls of the routes in `TRANSFER`, with their bodies.
        workers: size of the server's world.
        pace_s: seconds a token takes.
        mode: `processed` or `raw` log-probabilities.
    """

    def __init__(self, *, seed: int = 0, vocab: int = VOCAB, max_context: int = 64) -> None:
        self.disk = make_table(seed, vocab)
        self.vocab = vocab
        self.max_context = max_context
        self.name = "table"
        self.root = "table"
        self.pace_s = 0.0
        self.mode = "processed"
        self.dev_mode = True
        self.is_paused = False
        self.can_load_adapters = True
        self.faults: dict[str, list[Any]] = {}
        self.seen: list[dict[str, Any]] = []
        self.transfers: list[tuple[str, Any]] = []
        self.workers = 1
        self.calls: Counter[str] = Counter()
        self.most_running = self.running = 0
        self.port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restart()

    def _restart(self) -> None:
        """Be as a fresh process is: the weights of the disk, no adapter."""
        self.table = self.disk
        self.adapters: dict[str, NDArray[np.float32]] = {}
        self.weight_version = "default"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "FakeVLLM":
        """Serve from a thread; on the same port when it served before."""
        self._restart()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def stop(self) -> None:
        """Die: every connection breaks, the port is free."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(10)
            self._loop = None

    def _serve(self, ready: threading.Event) -> None:
        async def main() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            runner = web.AppRunner(
                self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=0
            )
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
            self.port = runner.addresses[0][1]
            ready.set()
            await self._end.wait()
            assert runner.server is not None
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()
            await asyncio.sleep(0.02)  # aborted transports close in the loop's next rounds

        asyncio.run(main())

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/load_lora_adapter", self._load_adapter),
                web.post("/v1/unload_lora_adapter", self._unload_adapter),
                web.get("/is_paused", self._paused),
                web.get("/weight_info", self._weight_info),
                web.post("/update_weight_version", self._set_weight_version),
                web.post("/collective_rpc", self._collective_rpc),
                web.get("/get_world_size", self._world_size),
                web.post("/pause", self._pause),
                web.post("/resume", self._pause),
                *(web.post(route, self._transfer) for route in TRANSFER),
            ]
        )
        return app

    @web.middleware  # type: ignore[untyped-decorator]
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        route = request.path
        self.calls[route] += 1
        if self.faults.get(route):
            found = self.faults[route].pop(0)(request)
            answer = await found if asyncio.iscoroutine(found) else found
            if answer is not None:
                return answer
        dev = {"/is_paused", "/weight_info", "/update_weight_version", "/collective_rpc"}
        if (route in dev and not self.dev_mode) or ("lora" in route and not self.can_load_adapters):
            return web.json_response({"detail": "Not Found"}, status=404)
        answer = await handler(request)
        return answer

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.Response:
        base: dict[str, Any] = {"id": self.name, "root": self.root, "parent": None}
        cards = [base | {"max_model_len": self.max_context}]
        cards += [base | {"id": name, "parent": self.name} for name in self.adapters]
        return web.json_response({"object": "list", "data": cards})

    async def _paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.is_paused})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _set_weight_version(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.weight_version})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": self.workers})

    async def _pause(self, request: web.Request) -> web.Response:
        self.is_paused = request.path == "/pause"
        return web.json_response({"status": "paused" if self.is_paused else "resumed"})

    async def _transfer(self, request: web.Request) -> web.Response:
        self.transfers.append((request.path, await request.json()))
        return web.json_response({"message": "done"})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return refuse(f"The lora adapter '{name}' has already been loaded.", 400)
        if not (path / "adapter_config.json").is_file():
            return refuse(f"Loading lora {name} failed: No adapter found for {path}", 404)
        config = json.loads((path / "adapter_config.json").read_text())
        tensors = load_file(path / "adapter_model.safetensors")
        a, b = (tensors[f"base_model.model.{ADAPTED}.lora_{x}.weight"] for x in "AB")
        self.adapters[name] = (b @ a) * (config["lora_alpha"] / config["r"])
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return refuse(f"The lora adapter '{name}' cannot be found.", 404)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            result = self.worker_call(
                body["method"], *body.get("args", []), **body.get("kwargs", {})
            )
        except Exception as error:
            words = f"Call to collective_rpc method failed: Worker failed with error '{error}'"
            return refuse(words, 500)
        return web.json_response({"results": [result]})

    def worker_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the worker extension does; see `turngym.agents.vllm_worker`."""
        assert method == "turngym_load_file", method
        (tensor,) = load_file(args[0]).values()
        if tensor.shape != self.table.shape:
            raise ValueError(f"shape {tensor.shape} does not fit {self.table.shape}")
        self.table = tensor
        return args[1]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        prompt, room = body["prompt"], self.max_context - len(body["prompt"])
        if body["model"] != self.name and body["model"] not in self.adapters:
            return refuse(f"The model `{body['model']}` does not exist.", 404)
        if bad := [id for id in prompt if not 0 <= id < self.vocab]:
            return refuse(f"Token id {bad[0]} is out of vocabulary", 400)
        if bad := [id for id in body.get("stop_token_ids", []) if not 0 <= id < self.vocab]:
            words = f"token_id(s) {bad} in stop_token_ids contain out-of-vocab token ids. "
            return refuse(f"{words}Vocabulary size: {self.vocab}", 400)
        if room <= 0:
            return refuse(f"This model's maximum context length is {self.max_context} tokens.", 400)
        while self.is_paused:
            await asyncio.sleep(0.01)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            tokens = self._sample(body, min(room, body["max_tokens"]))
            if not body.get("stream"):
                return web.json_response({"choices": [self._whole(body, list(tokens))]})
            return await self._stream(request, body, tokens)
        finally:
            self.running -= 1

    def _whole(self, body: dict[str, Any], tokens: list[dict[str, Any]]) -> dict[str, Any]:
        choice = chunk(body, tokens)
        if body.get("prompt_logprobs") is not None:
            logp, prompt = log_softmax(self._weights(body)), body["prompt"]
            told = ({b: {"logprob": logp[a, b]}} for a, b in pairwise(prompt))
            choice["prompt_logprobs"] = [None, *told]
        return choice

    def _weights(self, body: dict[str, Any]) -> NDArray[np.float32]:
        return self.table + self.adapters.get(body["model"], np.float32(0))

    async def _stream(
        self, request: web.Request, body: dict[str, Any], tokens: Iterator[dict[str, Any]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        waiting: list[dict[str, Any]] = []
        sent = 0
        for token in tokens:
            waiting.append(token)
            await asyncio.sleep(self.pace_s)
            every = 1 if not sent else body.get("stream_interval", 1)
            if len(waiting) < every and token["finish"] is None:
                continue
            event = {"choices": [chunk(body, waiting)]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            sent, waiting = sent + len(waiting), []
            for fault in list(self.faults.get("stream", [])):
                if sent >= fault:
                    self.faults["stream"].remove(fault)
                    assert request.transport is not None
                    request.transport.abort()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _sample(self, body: dict[str, Any], most: int) -> Iterator[dict[str, Any]]:
        """Yield tokens; the whole answer depends on the prompt, the seed and the weights alone."""
        rng = np.random.default_rng(body.get("seed", 0) % 2**63)
        last, temperature = body["prompt"][-1], body["temperature"]
        for position in range(most):
            weights = self._weights(body)
            shown = temperature if self.mode == "processed" and temperature else 1.0
            logp = log_softmax(weights[last], shown)
            drawn = np.cumsum(np.exp(log_softmax(weights[last], temperature or 1.0)))
            greedy = not temperature
            last = int(
                logp.argmax() if greedy else np.searchsorted(drawn, rng.random() * drawn[-1])
            )
            stop = last in body.get("stop_token_ids", [])
            finish = "stop" if stop else "length" if position == most - 1 else None
            top = {i: float(logp[i]) for i in np.argsort(-logp)[: body.get("logprobs", 0)].tolist()}
            yield {"id": last, "logp": float(logp[last]), "top": top, "finish": finish}
            if finish:
                return


def chunk(body: dict[str, Any], tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """One choice of an answer, or of an event of a stream."""
    named = [f"token_id:{token['id']}" for token in tokens]
    tops = [{token["id"]: token["logp"]} | token["top"] for token in tokens]
    return {
        "index": 0,
        "text": "",
        "logprobs": {
            "tokens": named,
            "token_logprobs": [token["logp"] for token in tokens],
            "top_logprobs": [{f"token_id:{i}": p for i, p in top.items()} for top in tops],
        },
        "finish_reason": tokens[-1]["finish"],
        "stop_reason": tokens[-1]["id"] if tokens[-1]["finish"] == "stop" else None,
        "token_ids": [token["id"] for token in tokens],
        "prompt_token_ids": body["prompt"],
    }


def refuse(words: str, status: int) -> web.Response:
    """An error in vLLM's shape."""
    error = {"message": words, "type": "BadRequestError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def fail(
    status: int = 500, words: str = "EngineCore encountered an issue. See stack trace"
) -> Fault:
    """The route answers with an error, once."""
    return lambda request: refuse(words, status)


def break_off(request: web.Request) -> None:
    """The connection breaks before an answer."""
    assert request.transport is not None
    request.transport.abort()


def hang(seconds: float = 30.0) -> Any:
    """The route says nothing for a while."""

    async def wait(request: web.Request) -> None:
        await asyncio.sleep(seconds)

    return wait


@contextmanager
def serving(count: int = 1, **options: Any) -> Iterator[list[FakeVLLM]]:
    """Yield running servers of the same model."""
    servers = [FakeVLLM(**options).start() for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            with suppress(RuntimeError):
                server.stop()
