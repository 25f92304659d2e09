"""Policies, renderers and the rollout engine: everything between messages and tokens.

Everything is imported on first use; only what needs torch loads it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turngym.agents.base import Completion, MessagePolicy, Policy, Sampling, WeightSync
    from turngym.agents.config import RolloutConfig
    from turngym.agents.evaluation import evaluate
    from turngym.agents.hf_policy import HFPolicy
    from turngym.agents.model import load_model, policy_logprobs
    from turngym.agents.openai_policy import OpenAIPolicy
    from turngym.agents.renderer import Renderer
    from turngym.agents.rollout import (
        DemoAgent,
        EnvSource,
        MessageAgent,
        RolloutEngine,
        TokenAgent,
    )
    from turngym.agents.scripted import OraclePolicy, RandomPolicy, ScriptedPolicy
    from turngym.agents.store import TrajectoryStore
    from turngym.agents.summary import summarize
    from turngym.agents.tiny import TinyConfig, build_tiny_agent
    from turngym.agents.vllm_policy import VLLMPolicy, open_vllm

_HOMES = {
    "Completion": "base",
    "DemoAgent": "rollout",
    "EnvSource": "rollout",
    "HFPolicy": "hf_policy",
    "MessageAgent": "rollout",
    "MessagePolicy": "base",
    "OpenAIPolicy": "openai_policy",
    "OraclePolicy": "scripted",
    "Policy": "base",
    "RandomPolicy": "scripted",
    "Renderer": "renderer",
    "RolloutConfig": "config",
    "RolloutEngine": "rollout",
    "Sampling": "base",
    "ScriptedPolicy": "scripted",
    "TinyConfig": "tiny",
    "TokenAgent": "rollout",
    "TrajectoryStore": "store",
    "VLLMPolicy": "vllm_policy",
    "WeightSync": "base",
    "build_tiny_agent": "tiny",
    "evaluate": "evaluation",
    "load_model": "model",
    "open_vllm": "vllm_policy",
    "policy_logprobs": "model",
    "summarize": "summary",
}

__all__ = [
    "Completion",
    "DemoAgent",
    "EnvSource",
    "HFPolicy",
    "MessageAgent",
    "MessagePolicy",
    "OpenAIPolicy",
    "OraclePolicy",
    "Policy",
    "RandomPolicy",
    "Renderer",
    "RolloutConfig",
    "RolloutEngine",
    "Sampling",
    "ScriptedPolicy",
    "TinyConfig",
    "TokenAgent",
    "TrajectoryStore",
    "VLLMPolicy",
    "WeightSync",
    "build_tiny_agent",
    "evaluate",
    "load_model",
    "open_vllm",
    "policy_logprobs",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
