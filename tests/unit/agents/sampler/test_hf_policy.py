import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from turngym.agents.base import Completion, Policy, Sampling
from turngym.agents.hf_policy import HFPolicy
from turngym.agents.model import policy_logprobs
from turngym.errors import ConfigError, EngineError

MakeModel = Callable[..., nn.Module]
MakePolicy = Callable[..., HFPolicy]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def sample(policy: HFPolicy, ids: list[int], seed: int = 0, **sampling: Any) -> Completion:
    return asyncio.run(policy.generate(ids, Sampling(**sampling), seed=seed))


def score(model: nn.Module, ids: list[int], completion: Completion) -> np.ndarray:
    row = np.array([*ids, *completion.ids], np.int32)
    found = policy_logprobs(model, [row], [np.arange(len(ids), len(row))]).logp
    return np.asarray(found.detach())


async def until_sampling(policy: HFPolicy, tokens: int) -> None:
    while policy.stats["sampled_tokens"] < tokens:
        await asyncio.sleep(0.001)


def test_it_is_a_policy(make_model: MakeModel, make_policy: MakePolicy) -> None:
    assert isinstance(make_policy(make_model("qwen3")), Policy)


def test_a_stop_token_ends_the_completion_and_is_part_of_it(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model("qwen3"))
    free = sample(policy, PROMPT, max_tokens=20)
    stop = int(free.ids[7])
    first = free.ids.tolist().index(stop)
    stopped = sample(policy, PROMPT, max_tokens=20, stop_ids=(60, stop))
    assert stopped.ids.tolist() == free.ids[: first + 1].tolist()
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")
    assert len(stopped.logp) == len(stopped.ids)


def test_another_requests_stop_token_stops_nobody_else(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model("qwen3"))
    sample(policy, PROMPT, max_tokens=2, stop_ids=tuple(range(61)))
    assert len(sample(policy, PROMPT, max_tokens=20).ids) == 20


def test_the_budget_is_what_the_context_leaves(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model("qwen3"), max_context=20)
    for length, room in ((12, 8), (19, 1), (20, 0), (25, 0)):
        completion = sample(policy, [1] * length, max_tokens=50)
        assert (len(completion.ids), completion.finish_reason) == (room, "length")


@pytest.mark.parametrize("bad", [61, 1000, -1])
def test_ids_outside_the_vocabulary_are_named(
    bad: int, make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model("qwen3"))
    with pytest.raises(EngineError, match=f"token id {bad} .* vocabulary of 61"):
        sample(policy, [1, bad, 2])
    with pytest.raises(EngineError, match=f"token id {bad} .* vocabulary of 61"):
        sample(policy, PROMPT, stop_ids=(bad,))


def test_an_empty_prompt_is_an_error(make_model: MakeModel, make_policy: MakePolicy) -> None:
    with pytest.raises(EngineError, match="prompt_ids is empty"):
        sample(make_policy(make_model("qwen3")), [])


def test_greedy_takes_the_models_own_best(make_model: MakeModel, make_policy: MakePolicy) -> None:
    model = make_model("qwen3")
    found = sample(make_policy(model), PROMPT, max_tokens=12, temperature=0.0)
    ids = list(PROMPT)
    for _ in range(12):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    assert found.ids.tolist() == ids[len(PROMPT) :]
    np.testing.assert_allclose(found.logp, score(model, PROMPT, found), atol=1e-5)


def test_log_probabilities_carry_the_temperature(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    found = sample(make_policy(model), PROMPT, max_tokens=30, temperature=0.6)
    row = np.array([*PROMPT, *found.ids], np.int32)
    where = np.arange(len(PROMPT), len(row))
    want = policy_logprobs(model, [row], [where], temperature=0.6).logp
    np.testing.assert_allclose(found.logp, want.detach().numpy(), atol=1e-5)


def test_draws_depend_on_the_seed_alone(make_model: MakeModel, make_policy: MakePolicy) -> None:
    policy = make_policy(make_model("qwen3"))

    async def together() -> list[Completion]:
        sampling = Sampling(max_tokens=15)
        return await asyncio.gather(
            *(policy.generate(PROMPT[: 3 + k % 5], sampling, seed=k) for k in range(40))
        )

    crowd = asyncio.run(together())
    for k in (0, 7, 39):
        alone = sample(policy, PROMPT[: 3 + k % 5], seed=k, max_tokens=15)
        assert alone.ids.tolist() == crowd[k].ids.tolist()
    assert len({tuple(one.ids) for one in crowd}) == 40


def test_a_session_computes_only_what_is_new(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model("qwen3"))

    async def dialogue(session: str) -> int:
        first = await policy.generate(PROMPT, Sampling(max_tokens=10), seed=1, session=session)
        before = policy.stats["fed_tokens"]
        ids = [*PROMPT, *first.ids.tolist(), 7, 8, 9]
        await policy.generate(ids, Sampling(max_tokens=1), seed=2, session=session)
        return policy.stats["fed_tokens"] - before

    # The last sampled token was never fed; then three new ones. Nameless calls keep nothing.
    assert asyncio.run(dialogue("a")) == 4
    assert asyncio.run(dialogue("")) == len(PROMPT) + 10 + 3


def test_a_context_that_rewrites_its_history_is_computed_again(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model)

    async def dialogue() -> list[tuple[list[int], Completion]]:
        found = []
        for ids in (PROMPT, [*PROMPT[:5], 7, 7, 7, 7], PROMPT[:3], PROMPT[:3]):
            completion = await policy.generate(
                ids, Sampling(max_tokens=6), seed=len(ids), session="a"
            )
            found.append((ids, completion))
        return found

    for ids, completion in asyncio.run(dialogue()):
        np.testing.assert_allclose(completion.logp, score(model, ids, completion), atol=1e-5)


def test_equal_prompts_that_arrive_together_are_computed_once(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model)

    async def group() -> list[Completion]:
        with policy.paused():
            tasks = [
                asyncio.ensure_future(policy.generate(PROMPT, Sampling(max_tokens=1), seed=k))
                for k in range(8)
            ]
            await asyncio.sleep(0.01)
        return await asyncio.gather(*tasks)

    completions = asyncio.run(group())
    assert policy.stats["fed_tokens"] == len(PROMPT)
    for completion in completions:
        np.testing.assert_allclose(completion.logp, score(model, PROMPT, completion), atol=1e-5)


def test_release_forgets_and_ignores_strangers(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model("qwen3"))
    asyncio.run(policy.generate(PROMPT, Sampling(max_tokens=2), seed=1, session="a"))
    assert policy.stats["cached_sessions"] == 1
    policy.release("nobody")
    policy.release("a")
    sample(policy, PROMPT, max_tokens=1)
    assert policy.stats["cached_sessions"] == 0


def test_idle_sessions_make_room_and_stay_right(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model, cache_mb=1)

    async def dialogue(row: int) -> list[tuple[list[int], Completion]]:
        found, ids = [], [row % 61, *PROMPT]
        for turn in range(3):
            sampling = Sampling(max_tokens=8)
            completion = await policy.generate(ids, sampling, seed=row * 9 + turn, session=str(row))
            found.append((ids, completion))
            ids = [*ids, *completion.ids.tolist(), 7, turn]
        return found

    async def everything() -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*(dialogue(row) for row in range(150)))

    results = asyncio.run(everything())
    assert policy.stats["evicted_sessions"] > 0
    for ids, completion in (turn for row in results[::10] for turn in row):
        np.testing.assert_allclose(completion.logp, score(model, ids, completion), atol=1e-5)


def test_requests_that_outgrow_memory_start_over_and_stay_right(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model, cache_mb=1)

    async def everything() -> list[Completion]:
        sampling = Sampling(max_tokens=150)
        return await asyncio.gather(
            *(policy.generate([row, *PROMPT], sampling, seed=row) for row in range(40))
        )

    completions = asyncio.run(everything())
    assert policy.stats["preempted_requests"] > 0
    for row in range(0, 40, 5):
        assert len(completions[row].ids) == 150
        want = score(model, [row, *PROMPT], completions[row])
        np.testing.assert_allclose(completions[row].logp, want, atol=1e-5)


def test_one_session_samples_one_completion_at_a_time(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model("qwen3"))

    async def twice() -> list[Completion | BaseException]:
        with policy.paused():  # so that the second comes while the first is in flight
            calls = [
                asyncio.create_task(
                    policy.generate(PROMPT, Sampling(max_tokens=9), seed=k, session="a")
                )
                for k in range(2)
            ]
            await asyncio.sleep(0.05)
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second = asyncio.run(twice())
    assert isinstance(first, Completion)
    assert "one completion at a time" in str(second)


def test_cancelling_frees_the_row_and_keeps_the_session_usable(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model, max_rows=1)

    async def cancel_then_go_on() -> Completion:
        running = asyncio.ensure_future(
            policy.generate(PROMPT, Sampling(max_tokens=180), seed=1, session="a")
        )
        waiting = asyncio.ensure_future(policy.generate(PROMPT, Sampling(max_tokens=9), seed=2))
        await until_sampling(policy, 3)
        waiting.cancel()
        running.cancel()
        return await policy.generate(PROMPT, Sampling(max_tokens=9), seed=3, session="a")

    completion = asyncio.run(asyncio.wait_for(cancel_then_go_on(), 30))
    np.testing.assert_allclose(completion.logp, score(model, PROMPT, completion), atol=1e-5)
    assert policy.stats["sampled_tokens"] < 180


def test_a_model_in_training_mode_is_sampled_without_dropout(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    completion = sample(make_policy(model), PROMPT)
    assert model.training
    np.testing.assert_allclose(completion.logp, score(model.eval(), PROMPT, completion), atol=1e-5)


def test_a_failing_model_fails_every_waiter_and_every_later_call(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("gpt2")
    policy = make_policy(model, max_rows=2)
    calls = 0

    def fail_late(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise ZeroDivisionError("out of luck")

    model.register_forward_pre_hook(fail_late)
    model.get_submodule("transformer").register_forward_pre_hook(fail_late)

    async def crowd() -> list[Completion | BaseException]:
        tasks = [policy.generate(PROMPT, Sampling(max_tokens=50), seed=k) for k in range(6)]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)

    for outcome in asyncio.run(crowd()):
        assert isinstance(outcome, EngineError)
        assert "ZeroDivisionError: out of luck" in str(outcome)
    with pytest.raises(EngineError, match="out of luck"):
        sample(policy, PROMPT)
    with pytest.raises(EngineError, match="out of luck"):
        policy.set_version(1)
    policy.release("a")


def test_logits_that_are_not_finite_are_an_error(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model)
    with torch.no_grad():
        next(iter(model.parameters())).fill_(float("nan"))
    policy.set_version(1)
    with pytest.raises(EngineError, match="not finite"):
        sample(policy, PROMPT)


def test_closing_ends_the_thread_and_what_is_in_flight(make_model: MakeModel) -> None:
    policy = HFPolicy(make_model("qwen3"))

    async def close_in_flight() -> None:
        task = asyncio.ensure_future(policy.generate(PROMPT, Sampling(max_tokens=180), seed=1))
        await until_sampling(policy, 2)
        policy.close()
        policy.close()
        with pytest.raises(EngineError, match="closed"):
            await task

    asyncio.run(asyncio.wait_for(close_in_flight(), 30))
    assert "sampler" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(EngineError, match="closed"):
        sample(policy, PROMPT)
    policy.release("a")


def test_a_forgotten_policy_closes_itself(make_model: MakeModel) -> None:
    policy = HFPolicy(make_model("qwen3"))
    sample(policy, PROMPT)
    assert "sampler" in {thread.name for thread in threading.enumerate()}
    del policy
    gc.collect()
    assert "sampler" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"cache_mb": 0}, "cache_mb must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"max_context": 193}, "max_context must lie in 2..192"),
        ({"max_context": 1}, "max_context must lie in 2..192"),
    ],
)
def test_limits_out_of_range_are_refused(
    options: dict[str, Any], message: str, make_model: MakeModel
) -> None:
    with pytest.raises(ConfigError, match=message):
        HFPolicy(make_model("qwen3"), **options)


def test_deterministic_sampling_wants_fp32(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match="float32 weights on a CPU"):
        HFPolicy(make_model("qwen3").bfloat16(), deterministic=True)


def test_half_precision_models_are_sampled_with_fp32_heads(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3").bfloat16()
    for fast in (True, False):
        completion = sample(make_policy(model, fast=fast), PROMPT, max_tokens=20)
        assert completion.logp.dtype == np.float32
        assert np.abs(completion.logp - score(model, PROMPT, completion)).mean() < 0.1
