import json
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import turngym
from turngym.envs.calls import make_call
from turngym.envs.wrappers import RecordEpisode, TextActions, TurnLimit
from turngym.errors import ConfigError, ResetNeededError
from turngym.types import Action

CALC = Action(role="assistant", content="", tool_calls=[make_call("calc", {"expr": "1+1"}, turn=0)])


def make() -> "gymnasium.Env[Any, Any]":
    return gymnasium.make("turngym/Calculator-v0")


def test_text_is_parsed_by_the_function_given() -> None:
    env = TextActions(make(), parse=lambda text: Action(role="assistant", content=text.upper()))
    env.reset(seed=0)
    assert "hello" in env.action_space
    *_, terminated, _, _ = env.step("hello")
    assert terminated
    assert env.get_wrapper_attr("turns")[0].content == "HELLO"


def test_messages_are_refused_where_text_is_expected() -> None:
    env = TextActions(make(), parse=lambda text: CALC)
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="takes text"):
        env.step(CALC)  # type: ignore[arg-type]


def test_the_turn_limit_truncates_and_scores() -> None:
    env = TurnLimit(make(), 2)
    env.reset(seed=0)
    assert env.step(CALC)[3] is False
    _, gained, terminated, truncated, info = env.step(CALC)
    assert (gained, terminated, truncated) == (0.0, False, True)
    assert info["stop_reason"] == "max_turns"
    assert info["rewards"] == {"correct": 0.0, "tool": 0.0, "format": 0.0, "success": 0.0}
    with pytest.raises(ResetNeededError):
        env.step(CALC)
    env.reset(seed=0)
    assert env.step(CALC)[3] is False


def test_the_turn_limit_leaves_other_endings_alone() -> None:
    env = TurnLimit(make(), 1)
    env.reset(seed=0)
    _, _, terminated, truncated, info = env.step(Action(role="assistant", content="42"))
    assert (terminated, truncated, info["stop_reason"]) == (True, False, "completed")
    with pytest.raises(ConfigError, match="at least 1"):
        TurnLimit(make(), 0)


def test_finished_episodes_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "episodes.jsonl"
    env = RecordEpisode(make(), str(file))
    with pytest.raises(ResetNeededError):
        env.step(CALC)
    env.reset(seed=0)
    env.step(CALC)
    env.step(Action(role="assistant", content="naïve 🙂"))
    env.reset(seed=1)
    env.step(CALC)
    env.finish("deadline")
    first, second = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    assert first["env_id"] == "turngym/Calculator-v0"
    assert [message["role"] for message in first["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert first["messages"][-1]["content"] == "naïve 🙂"
    assert first["stop_reason"] == "completed"
    assert first["turns"][-1]["rewards"]["correct"] == 0.0
    assert (second["stop_reason"], second["rewards"]["correct"]) == ("deadline", 0.0)


def test_wrapped_environments_can_be_made_again_from_their_spec(tmp_path: Path) -> None:
    env = TurnLimit(RecordEpisode(make(), str(tmp_path / "e.jsonl")), 2)
    assert env.spec is not None
    again = env.spec.make()
    assert isinstance(again, TurnLimit)
    assert isinstance(again.env, RecordEpisode)
    assert turngym.TurnLimit is TurnLimit


def test_hermes_text_becomes_calls() -> None:
    env = TextActions(make(), dialect="hermes")
    env.reset(seed=0)
    observation, *_ = env.step(
        '<think>add</think><tool_call>{"name": "calc", "arguments": {"expr": "1+1"}}</tool_call>'
    )
    assert [message["content"] for message in observation] == ["2"]
    *_, info = env.step('<tool_call>{"name": "calc", "arguments": {"expr": 2}}</tool_call>')
    assert info["results"][0].text == "argument 'expr': expected string, got number"
    observation, *_ = env.step('<tool_call>{"name": "calc", "arguments": </tool_call>')
    assert observation[0]["content"] == "the call is not valid JSON"
    assert env.step("<answer>42</answer>")[2]


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(ConfigError, match="klingon"):
        TextActions(make(), dialect="klingon")
