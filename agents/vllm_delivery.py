"""How weights get to vLLM servers, and how a request says which ones it wants.

Full weights: a file in shared memory that our worker extension loads, or GPU to GPU through vLLM's
registry; requests carry a cache salt. Adapters: a folder that the server loads under a name of its
own for each version. Salts and names begin with a word drawn for this run: a server may have served
another one.
"""

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.agents.handover import Handover, Named
from turngym.agents.http_client import HttpClient, RefusedError
from turngym.agents.vllm_backend import EngineSpec
from turngym.agents.vllm_fleet import ServerFaultError
from turngym.agents.vllm_transfer import Everywhere, GpuTransfer
from turngym.agents.vllm_weights import check_adapter, check_weights, trainer_shapes
from turngym.errors import EngineError, WeightSyncError

__all__ = ["LOAD_WEIGHTS", "START", "Current", "Delivery"]

START = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m "
    "vllm.entrypoints.openai.api_server --model MODEL --logprobs-mode processed_logprobs "
    "--worker-extension-cls turngym.agents.vllm_worker.WeightReceiver"
)
"""How to start a server that can be trained with (adapters: add --enable-lora)."""

LOAD_WEIGHTS = "turngym_load_file"
"""Method of our worker extension: `(path of a safetensors file, version) -> version`."""


_PROBE = [1, 5, 2, 7, 3, 11, 4, 13, 6, 9, 8, 12, 10, 14, 1, 15]
"""Any tokens that every vocabulary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """The weights that requests ask for now."""

    version: int = 0

    label: str
    """Salt of the prefix cache. An update of all weights also tells the servers."""

    is_told: bool = False
    """Whether the servers know the label: they then hold weights that we pushed."""

    adapter: str | None = None
    folder: Path | None = None
    """Of the adapter."""

    def fields(self, model: str) -> dict[str, str]:
        """Return what a request says of them."""
        return {"model": self.adapter or model, "cache_salt": self.label}


class Delivery:
    """Brings weights to servers. All calls of `bring` come from one thread.

    Args:
        everywhere: does something on every server and waits.
        timeout_s: of a call.
        folder: where files are handed over; None = shared memory.
        spec: what the trainer's weights look like; None = anything goes.
        transfer: sends full weights from GPU to GPU; None = as a file.
    """

    def __init__(
        self,
        everywhere: Everywhere,
        *,
        timeout_s: float,
        folder: Path | None = None,
        spec: EngineSpec | None = None,
        transfer: GpuTransfer | None = None,
    ) -> None:
        self._run = secrets.token_hex(4)
        self.current = Current(label=f"{self._run}-0")
        self._everywhere = everywhere
        self._timeout_s = timeout_s
        self._folder = folder
        self._spec = spec
        self._shapes = trainer_shapes(spec.model_path) if spec and not spec.lora_rank else None
        self._transfer = transfer
        self._handover: Handover | None = None

    def bring(self, named: Named, *, version: int) -> None:
        """Bring tensors to every server that can be reached, and have requests ask for them.

        Raises:
            WeightSyncError: a server refused them, none could be reached, or they could not be
                written. Adapters: the ones before stay in use.
        """
        try:
            if rank := self._rank(named):
                self._bring_adapter(named, version, rank)
            else:
                self._bring_weights(named, version)
        except WeightSyncError:
            raise
        except RefusedError as error:
            hint = f"; start the server with {START}" if error.status in (404, 405) else ""
            raise WeightSyncError(f"version {version} was not taken: {error}{hint}") from error
        except EngineError as error:
            raise WeightSyncError(f"version {version} was not delivered: {error}") from error

    def _rank(self, named: Named) -> int:
        """Return the rank of adapters, 0 for full weights; refuse what was not announced."""
        if self._spec is None:
            return next((len(tensor) for name, tensor in named if ".lora_A." in name), 0)
        if self._spec.lora_rank:
            check_adapter(named, self._spec.lora_rank)
        elif self._shapes is not None:
            check_weights(named, self._shapes)
        return self._spec.lora_rank

    def _bring_weights(self, named: Named, version: int) -> None:
        label = f"{self._run}-{version}"

        async def name(client: HttpClient) -> None:
            await self._post(client, "/update_weight_version", {"new_version": label})

        if self._transfer is not None:
            self._transfer.send(named)
            self._everywhere(name)
        else:
            with self._opened().weights(named, version) as path:

                async def load(client: HttpClient) -> None:
                    call = {"method": LOAD_WEIGHTS, "args": [str(path), version]}
                    await self._post(client, "/collective_rpc", call)
                    await name(client)

                self._everywhere(load, heals=True)
        self.current = Current(version=version, label=label, is_told=True)

    def _bring_adapter(self, named: Named, version: int, rank: int) -> None:
        handover, before = self._opened(), self.current
        alpha = 2.0 * rank if self._spec is None else self._spec.alpha
        folder = handover.adapter(named, version, rank=rank, alpha=alpha)
        now = Current(
            version=version,
            label=f"{self._run}-{version}",
            adapter=f"policy-{self._run}@{version}",
            folder=folder,
        )
        try:
            self._everywhere(lambda client: self._load(client, now), heals=True)
        except EngineError:
            self._unload(now)
            raise
        self.current = now
        self._unload(before)

    def _opened(self) -> Handover:
        if self._handover is None:
            self._handover = Handover(self._folder)
        return self._handover

    async def _post(self, client: HttpClient, path: str, body: Any) -> None:
        await client.text(path, body, timeout_s=self._timeout_s)

    async def _load(self, client: HttpClient, weights: Current) -> None:
        asked = {"lora_name": weights.adapter, "lora_path": str(weights.folder)}
        await self._post(client, "/v1/load_lora_adapter", asked)

    def _unload(self, weights: Current) -> None:
        """Best effort: an adapter left on a server costs memory, nothing else."""
        if weights.adapter is None or weights.folder is None:
            return

        async def unload(client: HttpClient) -> None:
            with contextlib.suppress(RefusedError):
                await self._post(client, "/v1/unload_lora_adapter", {"lora_name": weights.adapter})

        with contextlib.suppress(EngineError):
            self._everywhere(unload)
        self._opened().drop(weights.folder)

    def compare(self, model: str, *, tolerance: float) -> None:
        """Check that all servers think alike: the trainer's canary asks only one of them.

        Args:
            model: name of the servers' model.
            tolerance: largest difference of a token's log-probability.

        Raises:
            WeightSyncError: one does not have the weights of the others; holds both numbers.
        """
        found: dict[str, list[float]] = {}

        async def ask(client: HttpClient) -> None:
            body = {"prompt": _PROBE, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            fields = self.current.fields(model) | body
            told = await client.call("/v1/completions", fields, timeout_s=self._timeout_s)
            places = told["choices"][0]["prompt_logprobs"][1:]
            found[client.url] = [
                place[str(id)]["logprob"] for id, place in zip(_PROBE[1:], places, strict=True)
            ]

        self._everywhere(ask)
        (first, wanted), *others = sorted(found.items())
        for url, logp in others:
            place = max(range(len(logp)), key=lambda k: abs(logp[k] - wanted[k]))
            if not abs(logp[place] - wanted[place]) <= tolerance:
                raise WeightSyncError(
                    f"version {self.current.version}: {url} gives a token {logp[place]:.4f}, and "
                    f"{first} gives it {wanted[place]:.4f} (allowed difference {tolerance:g}): one "
                    "of them does not have the weights"
                )

    async def restore(self, client: HttpClient) -> None:
        """Bring the current adapter to a server that was restarted; weights must still be there.

        Raises:
            ServerFaultError: it does not have the current weights.
        """
        if self.current.adapter is not None:
            listed = await client.call("/v1/models", timeout_s=self._timeout_s)
            if self.current.adapter not in [card["id"] for card in listed["data"]]:
                await self._load(client, self.current)
        await self.confirm(client, self.current)

    async def confirm(self, client: HttpClient, wanted: Current) -> None:
        """Check that a server still has the weights it was given, not those it started with.

        Raises:
            ServerFaultError: it has others.
        """
        if not wanted.is_told:
            return
        told = await client.call("/weight_info", timeout_s=self._timeout_s)
        if told["weight_version"] != wanted.label:
            raise ServerFaultError(
                f"{client.url} has weights {told['weight_version']!r} instead of {wanted.label!r} "
                "(was it restarted?); it is left out until the next update"
            )

    def close(self) -> None:
        """Unload the adapter and remove the files. Idempotent."""
        before, self.current = self.current, Current(label=self.current.label)
        self._unload(before)
        if self._handover is not None:
            self._handover.close()
