import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import FakeVLLM, break_off, fail, hang, log_softmax, make_table, serving

from turngym.agents.base import Completion, Sampling
from turngym.agents.config import EngineConfig
from turngym.agents.vllm_backend import Sample, SampleRequest
from turngym.agents.vllm_policy import VLLMPolicy
from turngym.agents.vllm_server import ServerBackend
from turngym.errors import EngineError, WeightSyncError

PROMPT = [1, 2, 3]


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with serving() as (one,):
        yield one


def engine(*urls: str, timeout_s: float = 5.0) -> EngineConfig:
    return EngineConfig(kind="vllm", urls=urls, timeout_s=timeout_s)


def connect(*servers: FakeVLLM, timeout_s: float = 5.0) -> ServerBackend:
    return ServerBackend(engine(*(one.url for one in servers), timeout_s=timeout_s))


def request(
    prompt: list[int] = PROMPT,
    *,
    seed: int = 5,
    topk: int = 0,
    version: int = 0,
    session: str = "",
    **sampling: Any,
) -> SampleRequest:
    settings = Sampling(**({"max_tokens": 8} | sampling))
    return SampleRequest(
        ids=prompt, sampling=settings, seed=seed, version=version, topk=topk, session=session
    )


def sample(backend: ServerBackend, prompt: list[int] = PROMPT, **options: Any) -> Sample:
    asked = request(prompt, version=backend.version, **options)
    return backend.submit(asked).result(20)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def seat_of(servers: list[FakeVLLM]) -> FakeVLLM:
    """The one server that has sampled with the usual seed."""
    (found,) = [one for one in servers if any(body.get("seed") == 5 for body in one.seen)]
    return found


def facts(found: Sample) -> tuple[Any, ...]:
    return found.ids.tolist(), found.logp.tolist(), found.finish_reason


def expected(table: Any, ids: Any, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of tokens after the prompt."""
    before = [PROMPT[-1], *ids[:-1]]
    return [float(log_softmax(table[a], temperature)[b]) for a, b in zip(before, ids, strict=True)]


def test_tokens_come_with_their_log_probabilities(server: FakeVLLM) -> None:
    backend = connect(server)
    found = sample(backend, temperature=0.7, max_tokens=40, topk=2)
    assert len(found.ids) == 40
    assert found.finish_reason == "length"
    np.testing.assert_allclose(found.logp, expected(server.table, found.ids, 0.7), atol=1e-6)
    assert found.topk_ids is not None
    assert found.topk_logp is not None
    assert found.topk_ids.shape == (40, 2)
    assert (found.topk_logp[:, 0] >= found.topk_logp[:, 1]).all()
    again = sample(backend, temperature=0.7, max_tokens=40, topk=2)
    assert facts(again) == facts(found)
    assert facts(sample(backend, temperature=0.7, max_tokens=40, seed=6)) != facts(found)
    backend.close()


def test_a_request_says_everything_the_model_folder_could_change(server: FakeVLLM) -> None:
    backend = connect(server)
    sample(backend, stop_ids=[4])
    said = server.seen[-1]
    assert said["prompt"] == PROMPT
    assert (said["top_p"], said["top_k"], said["min_p"], said["repetition_penalty"]) == (1, 0, 0, 1)
    assert (said["ignore_eos"], said["stop_token_ids"]) == (True, [4])
    backend.close()


def test_pushed_weights_are_sampled_from_under_a_salt_of_their_own(server: FakeVLLM) -> None:
    backend = connect(server)
    sample(backend)
    for version in (1, 2):
        table = make_table(version)
        backend.load([("table", torch.from_numpy(table))], version=version)
        found = sample(backend)
        np.testing.assert_allclose(found.logp, expected(table, found.ids), atol=1e-6)
    salts = [body["cache_salt"] for body in server.seen[-3:]]
    assert len(set(salts)) == 3
    other = connect(server)
    other.load([("table", torch.from_numpy(make_table(1)))], version=1)
    sample(other)
    assert server.seen[-1]["cache_salt"] not in salts
    backend.close()
    other.close()


def adapter(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    name = "base_model.model.table.lora_{}.default.weight"
    return [
        (name.format("A"), torch.randn(2, 16, generator=generator)),
        (name.format("B"), torch.randn(16, 2, generator=generator)),
    ]


def test_adapters_are_named_by_version_and_the_old_one_leaves(server: FakeVLLM) -> None:
    backend = connect(server)
    for version in (1, 2):
        (_, a), (_, b) = pushed = adapter(version)
        backend.load(pushed, version=version)
        found = sample(backend)
        table = server.disk + 2 * (b @ a).numpy()
        np.testing.assert_allclose(found.logp, expected(table, found.ids), atol=1e-5)
    (name,) = server.adapters
    assert name.endswith("@2")
    backend.close()
    assert not server.adapters


def test_interrupted_requests_keep_their_tokens(server: FakeVLLM) -> None:
    backend = connect(server)
    whole = sample(backend, max_tokens=48)
    server.pace_s = 0.02
    futures = [backend.submit(request(max_tokens=48)) for _ in range(3)]
    time.sleep(0.5)
    backend.interrupt()
    for future in futures:
        found = future.result(5)
        assert found.finish_reason == "abort"
        assert 0 < len(found.ids) < 48
        assert found.ids.tolist() == whole.ids[: len(found.ids)].tolist()
    wait_until(lambda: not server.running)
    backend.close()


def test_a_cancelled_request_is_dropped_by_the_server(server: FakeVLLM) -> None:
    backend = connect(server)
    server.pace_s = 0.05
    future = backend.submit(request(max_tokens=48))
    wait_until(lambda: server.running == 1)
    future.cancel()
    wait_until(lambda: not server.running)
    backend.close()


@pytest.mark.parametrize("fault", [fail(500), fail(503), fail(429, "busy"), break_off])
def test_what_a_server_fails_at_is_done_again_with_the_same_result(
    server: FakeVLLM, fault: Any
) -> None:
    backend = connect(server)
    whole = sample(backend)
    server.faults["/v1/completions"] = [fault]
    assert facts(sample(backend)) == facts(whole)
    backend.close()


def test_a_stream_that_is_cut_off_is_begun_again(server: FakeVLLM) -> None:
    backend = connect(server)
    whole = sample(backend, max_tokens=40)
    server.faults["stream"] = [17]
    assert facts(sample(backend, max_tokens=40)) == facts(whole)
    backend.close()


def test_another_server_takes_over_when_one_dies_in_the_middle() -> None:
    with serving(2) as servers:
        backend = connect(*servers)
        whole = sample(backend, max_tokens=48, session="a")
        first = seat_of(servers)
        wait_until(lambda: not first.running)
        first.pace_s = 0.05
        future = backend.submit(request(max_tokens=48, session="a"))
        wait_until(lambda: first.running == 1)
        first.stop()
        assert facts(future.result(10)) == facts(whole)
        backend.close()


def test_requests_spread_over_servers_and_sessions_stay() -> None:
    with serving(2) as servers:
        for one in servers:
            one.pace_s = 0.01
        backend = connect(*servers)
        for _ in range(2):
            futures = [backend.submit(request([n], seed=100 + n, session=str(n))) for n in range(8)]
            for future in futures:
                future.result(10)
        seeds = [
            [body["seed"] for body in one.seen if body.get("seed", 0) >= 100] for one in servers
        ]
        assert [len(set(found)) for found in seeds] == [4, 4]
        assert all(found.count(seed) == 2 for found in seeds for seed in found)
        backend.close()


def test_a_restarted_server_gets_its_adapter_back() -> None:
    with serving() as (server,):
        backend = connect(server)
        backend.load(adapter(1), version=1)
        whole = sample(backend)
        server.stop()
        server.start()
        assert facts(sample(backend)) == facts(whole)
        backend.close()


def test_a_restarted_server_is_left_out_until_it_has_the_weights_again() -> None:
    with serving(2) as servers:
        backend = connect(*servers)
        table = make_table(1)
        backend.load([("table", torch.from_numpy(table))], version=1)
        whole = sample(backend, session="a")
        seat = seat_of(servers)
        seat.stop()
        seat.start()
        assert facts(sample(backend, session="a")) == facts(whole)
        assert len(backend.faults) == 1
        assert "instead of" in next(iter(backend.faults.values()))
        backend.load([("table", torch.from_numpy(table))], version=2)
        assert not backend.faults
        backend.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt": [1, 99]}, "token id 99 is outside the vocabulary"),
        ({"stop_ids": [77]}, "77"),
        ({"prompt": [1] * 64}, "does not fit"),
    ],
)
def test_what_a_server_refuses_is_told_in_its_words_and_not_tried_again(
    server: FakeVLLM, options: Any, says: str
) -> None:
    backend = connect(server)
    before = len(server.seen)
    with pytest.raises(EngineError, match=says):
        sample(backend, **options)
    assert len(server.seen) == before + 1
    backend.close()


def test_raw_log_probabilities_are_refused_at_other_temperatures(server: FakeVLLM) -> None:
    server.mode = "raw"
    backend = connect(server)
    found = sample(backend)
    np.testing.assert_allclose(found.logp, expected(server.table, found.ids), atol=1e-6)
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        sample(backend, temperature=0.5)
    backend.close()


def test_a_server_that_hangs_is_given_up(server: FakeVLLM) -> None:
    backend = connect(server, timeout_s=0.3)
    server.faults["/v1/completions"] = [hang(), hang(), hang(), hang()]
    started = time.monotonic()
    with pytest.raises(EngineError, match="said nothing for"):
        sample(backend)
    assert time.monotonic() - started < 5
    backend.close()


def test_a_paused_server_is_named(server: FakeVLLM) -> None:
    server.is_paused = True
    with pytest.raises(EngineError, match="is paused; POST http"):
        connect(server)


def test_a_server_that_cannot_be_reached_is_named(server: FakeVLLM) -> None:
    url = server.url
    server.stop()
    with pytest.raises(EngineError, match=url):
        ServerBackend(engine(url, timeout_s=1.0))


def test_one_server_out_of_reach_leaves_the_others_working() -> None:
    with serving(2) as servers:
        servers[0].stop()
        backend = connect(*servers)
        assert len(sample(backend).ids) == 8
        assert list(backend.faults) == [servers[0].url]
        backend.close()


def test_servers_of_different_models_are_refused() -> None:
    with serving(2) as servers:
        servers[1].name = "other"
        with pytest.raises(EngineError, match="must serve one model"):
            connect(*servers)


def test_a_refused_adapter_leaves_the_old_one_in_use(server: FakeVLLM) -> None:
    backend = connect(server)
    backend.load(adapter(1), version=1)
    whole = sample(backend)
    server.faults["/v1/load_lora_adapter"] = [fail(500, "no slot left")]
    with pytest.raises(WeightSyncError, match=r"version 2 was not taken.*no slot left"):
        backend.load(adapter(2), version=2)
    assert facts(sample(backend)) == facts(whole)
    backend.close()


def test_weights_of_the_wrong_shape_are_refused_in_the_servers_words(server: FakeVLLM) -> None:
    backend = connect(server)
    with pytest.raises(WeightSyncError, match=r"shape \(3, 3\) does not fit"):
        backend.load([("table", torch.zeros(3, 3))], version=1)
    backend.close()


@pytest.mark.parametrize("lora", [False, True])
def test_a_server_that_takes_no_weights_says_how_to_start_it(server: FakeVLLM, lora: bool) -> None:
    server.dev_mode = server.can_load_adapters = False
    backend = connect(server)
    needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if lora else "VLLM_SERVER_DEV_MODE"
    with pytest.raises(WeightSyncError, match=needs):
        backend.load(adapter(1) if lora else [("table", torch.zeros(16, 16))], version=1)
    backend.close()


def test_a_closed_backend_refuses_and_lets_waiting_requests_fail(server: FakeVLLM) -> None:
    backend = connect(server)
    server.pace_s = 0.1
    future = backend.submit(request(max_tokens=48))
    wait_until(lambda: server.running == 1)
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        future.result(5)
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        sample(backend)


@pytest.mark.parametrize("lora", [False, True])
def test_servers_that_do_not_think_alike_after_an_update_are_found_out(
    lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = adapter if lora else lambda seed: [("table", torch.from_numpy(make_table(seed)))]
    with serving(2) as servers:
        backend = connect(*servers)
        backend.load(named(1), version=1)
        if lora:
            monkeypatch.setattr(servers[1], "_weights", lambda body: servers[1].table)
        else:
            monkeypatch.setattr(servers[1], "worker_call", lambda *args: args[-1])
        with pytest.raises(
            WeightSyncError, match=r"version 2: .* gives a token -\d.* gives it -\d"
        ):
            backend.load(named(2), version=2)
        backend.close()


@pytest.mark.parametrize("lora", [False, True])
def test_requests_in_flight_go_on_under_new_weights_and_every_token_names_its_own(
    lora: bool,
) -> None:
    with serving(2) as servers, VLLMPolicy(connect(*servers)) as policy:
        for one in servers:
            one.pace_s = 0.02
        tables = {0: servers[0].disk}
        if lora:
            (_, a), (_, b) = pushed = adapter(1)
            tables[1] = tables[0] + 2 * (b @ a).numpy()
        else:
            tables[1] = make_table(1)
            pushed = [("table", torch.from_numpy(tables[1]))]

        async def main() -> list[Completion]:
            asked = [
                policy.generate(PROMPT, Sampling(max_tokens=48), seed=n, session=str(n))
                for n in range(6)
            ]
            tasks = [asyncio.create_task(one) for one in asked]
            await asyncio.sleep(0.6)
            await asyncio.to_thread(policy.push, pushed, version=1)
            return await asyncio.gather(*tasks)

        for done in asyncio.run(main()):
            assert [version for version, _ in done.version_spans] == [0, 1]
            versions = np.repeat(*np.array(done.version_spans).T)
            want = np.where(
                versions == 0, expected(tables[0], done.ids), expected(tables[1], done.ids)
            )
            assert len(done.ids) == 48
            np.testing.assert_allclose(done.logp, want, atol=1e-5)


def test_a_request_for_another_version_is_refused_with_both_numbers(server: FakeVLLM) -> None:
    backend = connect(server)
    with pytest.raises(
        WeightSyncError, match="version 3 was asked for, the servers have version 0"
    ):
        backend.submit(request(version=3)).result(5)
    backend.close()


def test_the_key_of_the_servers_is_sent(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    said: list[str | None] = []
    server.faults["/v1/models"] = [lambda asked: said.append(asked.headers.get("Authorization"))]
    connect(server).close()
    assert said == ["Bearer secret"]


def test_an_update_goes_on_without_a_server_whose_engine_is_gone() -> None:
    with serving(2) as servers:
        backend = connect(*servers)
        servers[0].faults["/collective_rpc"] = [fail(500)]
        table = make_table(1)
        backend.load([("table", torch.from_numpy(table))], version=1)
        assert list(backend.faults) == [servers[0].url]
        found = sample(backend)
        np.testing.assert_allclose(found.logp, expected(table, found.ids), atol=1e-6)
        backend.close()
