import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from turngym.agents.agent import LimitReachedError
from turngym.agents.base import ActContext
from turngym.agents.config import RolloutConfig
from turngym.agents.openai_policy import OpenAIPolicy
from turngym.agents.rollout import EnvSource, MessageAgent, RolloutEngine
from turngym.errors import ConfigError, EngineError
from turngym.types import Action, Message


class Server:
    """A chat server on the loopback that answers from a list and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append(json.loads(body))
                outer.headers.append(self.headers)
                code, answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                return None

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def says(self, finish_reason: str = "stop", **message: Any) -> None:
        choice = {"message": {"role": "assistant"} | message, "finish_reason": finish_reason}
        self.answers.append((200, {"choices": [choice]}))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def ask(server: Server, messages: list[Message] | None = None, **options: Any) -> Action:
    policy = OpenAIPolicy("m", base_url=server.url, pause_s=0.01, **options)
    context = ActContext(tools=(), turn=0, rng=random.Random(0), demonstrate=None)
    question = messages or [Message(role="user", content="hi")]
    try:
        return asyncio.run(policy.act(question, context))
    finally:
        policy.close()


def test_calls_are_read_and_broken_arguments_are_the_models_fault(server: Server) -> None:
    server.says(
        content=None,
        reasoning_content="so",
        tool_calls=[
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "y", "type": "function", "function": {"name": "f", "arguments": '{"a": '}},
            {"id": "z", "type": "function", "function": {"name": "f", "arguments": "[1]"}},
        ],
    )
    action = ask(server, api_key="k", max_tokens=9)
    assert action["content"] == ""
    assert action["reasoning_content"] == "so"
    assert [call["function"]["arguments"] for call in action["tool_calls"]] == [{"a": 1}]
    found = [(one["error"], one["index"]) for one in action["invalid_tool_calls"]]
    assert found == [("malformed_json", 1), ("arguments_not_object", 2)]
    assert server.asked[0]["max_tokens"] == 9
    assert server.headers[0]["Authorization"] == "Bearer k"


def test_history_is_written_as_servers_take_it(server: Server) -> None:
    server.says(content="done")
    call: Any = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    invalid: Any = [{"text": "f(", "error": "malformed_json", "span": (0, 2)}]
    ask(
        server,
        [
            Message(role="user", content="q"),
            Message(role="assistant", content="", tool_calls=[call], invalid_tool_calls=invalid),
            Message(role="tool", content="1", tool_call_id="x"),
            Message(role="tool", content="unreadable", tool_call_id="call_0_1"),
        ],
    )
    sent = server.asked[0]["messages"]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert sent[1]["content"] == "f("
    assert sent[2] == {"role": "tool", "content": "1", "tool_call_id": "x"}
    assert sent[3] == {"role": "user", "content": "unreadable"}


def test_a_busy_server_is_asked_again_and_a_dead_one_is_an_engine_error(server: Server) -> None:
    server.answers.append((503, {"error": "busy"}))
    server.says(content="done")
    assert ask(server)["content"] == "done"
    server.answers = [(500, {"error": "still broken"})]
    with pytest.raises(EngineError, match=r"500.*still broken"):
        ask(server, retries=1)
    assert len(server.asked) == 4


def test_a_refused_request_is_a_wrong_setting(server: Server) -> None:
    server.answers.append((404, {"error": "no model 'm'"}))
    with pytest.raises(ConfigError, match=r"404.*no model"):
        ask(server)
    assert len(server.asked) == 1


def test_an_answer_without_a_message_is_an_engine_error(server: Server) -> None:
    server.answers.append((200, {"choices": []}))
    with pytest.raises(EngineError, match="without a message"):
        ask(server)


def test_token_limits_of_the_server_truncate_the_episode(
    server: Server, relay: Callable[..., EnvSource]
) -> None:
    server.says("length", content="and so")
    server.answers.append((400, {"error": {"code": "context_length_exceeded"}}))
    with pytest.raises(LimitReachedError):
        ask(server)
    policy = OpenAIPolicy("m", base_url=server.url, pause_s=0.01)
    agent = MessageAgent.factory(policy)
    with RolloutEngine(relay(), agent, RolloutConfig(group_size=1), seed=0) as engine:
        record = engine.run([0])[0].trajectories[0]
    policy.close()
    assert (record.status, record.rewards) == ("context_full", {"correct": 0.0})
    assert record.turns[0].finish_reason == "length"


def test_an_unreachable_server_is_an_engine_error_and_a_bad_address_a_setting() -> None:
    policy = OpenAIPolicy("m", base_url="http://127.0.0.1:9/v1", retries=0)
    context = ActContext(tools=(), turn=0, rng=random.Random(0), demonstrate=None)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        asyncio.run(policy.act([Message(role="user", content="hi")], context))
    policy.close()
    with pytest.raises(ConfigError, match="http://"):
        OpenAIPolicy("m", base_url="localhost:8000")
