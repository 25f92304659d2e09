"""Policies by name: `oracle`, `random`, a model's folder or hub id, `vllm:URL`, `openai:URL`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from turngym.agents.config import EngineConfig, RolloutConfig
from turngym.cli.console import quiet_transformers
from turngym.errors import ConfigError

if TYPE_CHECKING:
    from turngym.agents.agent import AgentFactory
    from turngym.agents.base import TrainablePolicy

__all__ = ["PolicyOptions", "open_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """How a policy that is a model samples and speaks."""

    temperature: float = 1.0
    """0 = greedy."""

    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""

    dialect: str | None = None
    """How the model writes tool calls; None = told from its chat template."""

    on_rewrite: Literal["error", "append", "segments"] = "segments"
    """What to do with a chat template that rewrites history (drops earlier reasoning)."""

    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    """Threads of a matrix product; tiny models run fastest with 1. None = torch's choice."""

    server_model: str = "default"
    """Name of the model on an OpenAI-style server."""


@contextmanager
def open_policy(
    name: str,
    options: PolicyOptions,
    rollout: RolloutConfig,
    engine: EngineConfig,
    *,
    tokenizer: str | None = None,
) -> "Iterator[AgentFactory]":
    """Yield the agent factory of a policy, and close the policy afterwards.

    Args:
        name: `oracle` (the environment's expert), `random`, `openai:URL` (an OpenAI-style server,
            URL up to `/v1`, message by message), `vllm:URL[,URL]` (running vLLM servers, token by
            token), or the folder or hub id of a model.
        options: for models and servers.
        rollout: limits.
        engine: what samples the tokens of a model.
        tokenizer: folder or hub id; None = the model's own.

    Raises:
        ConfigError: nothing loadable has this name.
    """
    if name in ("oracle", "random"):
        from turngym.agents.agent import MessageAgent
        from turngym.agents.scripted import OraclePolicy, RandomPolicy

        yield MessageAgent.factory(OraclePolicy() if name == "oracle" else RandomPolicy())
    elif name.startswith("openai:"):
        from turngym.agents.agent import MessageAgent
        from turngym.agents.openai_policy import OpenAIPolicy

        server = OpenAIPolicy(
            options.server_model,
            base_url=name.removeprefix("openai:"),
            temperature=options.temperature,
            max_tokens=rollout.max_tokens,
            concurrency=rollout.concurrency,
        )
        yield MessageAgent.factory(server)
    elif not name:
        raise ConfigError("name a policy: --policy oracle | random | MODEL | vllm:URL | openai:URL")
    else:
        if name.startswith("vllm:"):
            engine = _at_urls(engine, name.removeprefix("vllm:"))
            name = ""
        with _open_model(name, options, rollout, engine, tokenizer) as factory:
            yield factory


def _at_urls(engine: EngineConfig, urls: str) -> EngineConfig:
    """Return engine settings that name running servers.

    Raises:
        ConfigError: they are named twice, or not at all.
    """
    if engine.urls:
        raise ConfigError("name the servers with --policy vllm:URL or --engine.urls, not both")
    named = tuple(url.strip() for url in urls.split(",") if url.strip())
    if not named:
        raise ConfigError("--policy vllm: needs an address, such as vllm:http://localhost:8000")
    return replace(engine, kind="vllm", isolated=False, urls=named)


@contextmanager
def _open_model(
    path: str,
    options: PolicyOptions,
    rollout: RolloutConfig,
    engine: EngineConfig,
    tokenizer_path: str | None,
) -> "Iterator[AgentFactory]":
    from turngym.agents.agent import TokenAgent
    from turngym.agents.base import Sampling
    from turngym.agents.renderer import Renderer

    quiet_transformers()
    sampling = Sampling(
        temperature=options.temperature,
        max_tokens=rollout.max_tokens,
        top_p=options.top_p,
        top_k=options.top_k,
    )
    opened = _open_vllm if engine.kind == "vllm" else _open_hf
    policy, tokenizer, vocab = opened(path, tokenizer_path, options, rollout, engine)
    try:
        renderer = Renderer(tokenizer, dialect=options.dialect, on_rewrite=options.on_rewrite)
        renderer.check_vocab(vocab)
        yield TokenAgent.factory(policy, renderer, sampling)
    finally:
        policy.close()


def _open_hf(
    path: str,
    tokenizer_path: str | None,
    options: PolicyOptions,
    rollout: RolloutConfig,
    engine: EngineConfig,
) -> "tuple[TrainablePolicy, Any, int]":
    """Return a policy in this process, its tokenizer and the size of its vocabulary."""
    from turngym.agents.hf_policy import HFPolicy
    from turngym.agents.model import load_model, vocab_size
    from turngym.agents.pretrained import load_tokenizer

    model, tokenizer = load_model(path, dtype=options.dtype, device=options.device)
    if tokenizer_path is not None:
        tokenizer = load_tokenizer(tokenizer_path)
    policy = HFPolicy(
        model,
        max_rows=rollout.concurrency,
        max_context=rollout.max_context,
        deterministic=rollout.deterministic,
        threads=options.threads,
    )
    return policy, tokenizer, vocab_size(model)


def _open_vllm(
    path: str,
    tokenizer_path: str | None,
    options: PolicyOptions,
    rollout: RolloutConfig,
    engine: EngineConfig,
) -> "tuple[TrainablePolicy, Any, int]":
    """The same over vLLM; without a path, of the model that the named servers serve."""
    from turngym.agents.pretrained import load_tokenizer
    from turngym.agents.vllm_policy import VLLMPolicy, open_vllm

    if path:
        policy = open_vllm(
            engine,
            model_path=Path(path),
            max_context=rollout.max_context,
            rows=rollout.concurrency,
            deterministic=rollout.deterministic,
            threads=options.threads,
            dtype=options.dtype if engine.dtype == "auto" else engine.dtype,
            training=False,
        )
    else:
        from turngym.agents.vllm_server import ServerBackend

        backend = ServerBackend(engine)
        policy = VLLMPolicy(backend, training=False, timeout_s=engine.timeout_s)
        path = backend.model_path
    try:
        return policy, load_tokenizer(tokenizer_path or path), policy.backend.vocab
    except BaseException:
        policy.close()
        raise
