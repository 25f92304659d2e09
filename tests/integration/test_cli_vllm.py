"""`--policy vllm:URL` against the fake server: the model is a table over the tiny tokenizer."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_vllm import FakeVLLM, serving

from turngym.agents.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ["--rollout.max-tokens", "12", "--rollout.max-context", "300"]


def turngym(*argv: str) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "turngym.cli", *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(tokenizer: Path) -> Iterator[list[FakeVLLM]]:
    with serving(2, vocab=len(tiny_tokenizer()), max_context=1024) as found:
        for server in found:
            server.root = str(tokenizer)
        yield found


def test_eval_samples_token_by_token_from_several_servers(servers: list[FakeVLLM]) -> None:
    url = ",".join(server.url for server in servers)
    argv = ["eval", "Calculator-v0", "--policy", f"vllm:{url}", "--tasks", "6", "--json", *LIMITS]
    found, again = turngym(*argv), turngym(*argv)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["episodes"] == 6
    assert found.stdout == again.stdout
    assert all(server.calls["/v1/completions"] > 3 for server in servers)


def test_rollout_records_what_the_servers_sampled(servers: list[FakeVLLM], tmp_path: Path) -> None:
    out = tmp_path / "episodes"
    argv = ["--policy", f"vllm:{servers[0].url}", "--tasks", "2", "--out", str(out), *LIMITS]
    argv += ["--rollout.group-size", "1"]
    found = turngym("rollout", "Calculator-v0", *argv)
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["sampled_tokens"] > 0 for row in rows)


def test_play_shows_an_episode_of_a_policy(servers: list[FakeVLLM]) -> None:
    argv = ["play", "Calculator-v0", "--seed", "1", *LIMITS]
    shown = turngym(*argv, "--policy", f"vllm:{servers[0].url}")
    assert shown.returncode == 0, shown.stderr
    assert "[user] What is" in shown.stdout
    assert "over: max_tokens" in shown.stdout
    oracle = turngym(*argv, "--policy", "oracle")
    assert "[calls] calc" in oracle.stdout
    assert '"success": 1.0' in oracle.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--policy", "vllm:"], "--policy vllm: needs an address"),
        (["--policy", "vllm:nonsense"], "http://host:port, got 'nonsense'"),
        (["--policy", "vllm:http://127.0.0.1:9", "--engine.timeout-s", "2"], "127.0.0.1:9"),
        (["--policy", "vllm:{url}", "--tokenizer", "nowhere/at-all"], "--tokenizer"),
        (["--policy", "vllm:{url}", "--engine.kind", "vllm", "--engine.urls", "x"], "not both"),
        (["--policy", "oracle", "--engine.urls", "http://x"], "add engine.kind='vllm'"),
    ],
)
def test_what_cannot_work_is_refused_and_names_the_flag(
    servers: list[FakeVLLM], argv: list[str], says: str
) -> None:
    asked = [word.format(url=servers[0].url) for word in argv]
    found = turngym("eval", "Calculator-v0", "--tasks", "1", *asked)
    assert found.returncode in (1, 2)
    assert says in found.stderr
    assert "Traceback" not in found.stderr
