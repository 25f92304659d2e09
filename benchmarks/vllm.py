"""VLLMPolicy against the trainer (exactness) and against vLLM's own offline loop (overhead).

    python benchmarks/vllm.py --groups 50            # 200 trajectories
    python benchmarks/vllm.py --lora 4
    python benchmarks/vllm.py --isolated

Exactness: a tiny agent after a short cold start plays the calculator for several turns; every
sampled token's log-probability is compared with the trainer's, before the first push, after 20
pushes, and while weights are pushed in flight (each token under its own version). How far either
is from float64 says what of that is rounding. Speed: the same
prompts and token counts through `VLLMPolicy.generate` and through the bare engine, in turns
(A, B, A, B, ...), ratios are medians over the pairs; dialogues with the prefix cache warm and cold;
the time of a push.
"""

import argparse
import asyncio
import copy
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.agents.base import Sampling
from turngym.agents.config import EngineConfig, RolloutConfig
from turngym.agents.model import attach_lora, load_model, policy_logprobs
from turngym.agents.renderer import Renderer
from turngym.agents.rollout import DemoAgent, EnvSource, RolloutEngine, TokenAgent
from turngym.agents.tiny import TinyConfig, build_tiny_agent
from turngym.agents.vllm_policy import VLLMPolicy, open_vllm
from turngym.rl.batch import Batch
from turngym.rl.config import OptimConfig, SftConfig
from turngym.rl.sft import cold_start
from turngym.types import Group

TINY = TinyConfig(hidden_size=192, heads=6, kv_heads=3, head_dim=32, mlp_size=192, max_context=512)
SOURCE = EnvSource("turngym/Calculator-v0", {"level": 2})
ROWS, PROMPT, NEW, TURNS = 64, 40, 48, 8


def make_agent(folder: Path, steps: int) -> Path:
    """Write a tiny agent that has learned the format from demonstrations."""
    model, tokenizer = load_model(build_tiny_agent(folder / "fresh", TINY), device="cpu")
    agent = DemoAgent.factory(Renderer(tokenizer))
    with RolloutEngine(SOURCE, agent, RolloutConfig(group_size=1), seed=1) as engine:
        demos = engine.run(range(200))
    optim = OptimConfig(lr=1e-3, warmup_steps=10, schedule="linear")
    cold_start(model, demos, SftConfig(steps=steps, batch_size=12, optim=optim), seed=1)
    model.save_pretrained(folder / "model")  # type: ignore[operator]
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def play(policy: VLLMPolicy, renderer: Renderer, ordinals: Sequence[int]) -> list[Group]:
    """Roll out groups of four."""
    config = RolloutConfig(group_size=4, max_tokens=NEW)
    with RolloutEngine(SOURCE, TokenAgent.factory(policy, renderer), config, seed=7) as engine:
        return engine.run(ordinals)


def score(model: Any, batch: Batch) -> NDArray[np.float32]:
    """Return the trainer's log-probabilities, (N,)."""
    parts = []
    for start in range(0, len(batch.contexts), 16):
        chosen = batch.contexts[start : start + 16]
        rows, where = [c.ids for c in chosen], [c.positions for c in chosen]
        with torch.no_grad():
            parts.append(policy_logprobs(model, rows, where).logp.numpy())
    return np.concatenate(parts)


def score_exactly(model: Any, batch: Batch) -> NDArray[np.float64]:
    """Return the same in float64, each context alone, (N,)."""
    exact = copy.deepcopy(model).double()
    parts = []
    for context in batch.contexts:
        ids, where = torch.tensor(context.ids).long(), torch.tensor(context.positions)
        with torch.no_grad():
            logp = exact(input_ids=ids[None]).logits[0].log_softmax(-1)
        parts.append(logp[where - 1, ids[where]].numpy())
    return np.concatenate(parts)


def report_gap(name: str, models: dict[int, Any], groups: Sequence[Group]) -> None:
    """Print the largest difference of a log-probability, each token by its own version."""
    batch = Batch.from_groups(groups)
    version, theirs = batch.version.numpy(), batch.logp_rollout.numpy()
    ours, exact = np.zeros(len(version)), np.zeros(len(version))
    for number in sorted(set(version.tolist())):
        own = version == number
        ours[own] = score(models[number], batch)[own]
        exact[own] = score_exactly(models[number], batch)[own]
    gaps = np.abs(ours - theirs)
    several = sum(len(t.turns) > 1 for g in groups for t in g.trajectories)
    print(
        f"{name:14s} {sum(len(g.trajectories) for g in groups)} trajectories ({several} of several "
        f"turns), {len(gaps)} tokens, {len(set(version.tolist()))} version(s): max {gaps.max():.2e}"
        f", 99.9 % below {np.quantile(gaps, 0.999):.1e}; from float64, engine max "
        f"{np.abs(theirs - exact).max():.2e}, trainer max {np.abs(ours - exact).max():.2e}"
    )


def trainable(model: Any) -> list[tuple[str, Any]]:
    """Return what is pushed."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def perturb(model: Any, seed: int) -> None:
    """Change every trainable weight a little."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(0.003 * torch.randn_like(parameter))


def exactness(policy: VLLMPolicy, model: Any, renderer: Renderer, groups: int) -> None:
    """Compare before a push, after 20, and with pushes in flight."""
    report_gap("before a push", {0: model}, play(policy, renderer, range(groups)))
    times = []
    for version in range(1, 21):
        perturb(model, version)
        began = time.perf_counter()
        policy.push(trainable(model), version=version)
        times.append(time.perf_counter() - began)
    report_gap("after 20", {20: model}, play(policy, renderer, range(groups)))
    print(
        f"push: median {statistics.median(times) * 1e3:.1f} ms, largest {max(times) * 1e3:.1f} ms"
    )
    models = {20: copy.deepcopy(model)}
    done = threading.Event()

    def keep_pushing() -> None:
        while not done.wait(0.5):
            version = policy.version + 1
            perturb(model, version)
            models[version] = copy.deepcopy(model)
            policy.push(trainable(model), version=version)

    pusher = threading.Thread(target=keep_pushing)
    pusher.start()
    try:
        played = play(policy, renderer, range(groups))
    finally:
        done.set()
        pusher.join()
    report_gap("in flight", models, played)


def through_policy(policy: VLLMPolicy, prompts: list[list[int]], seed: int) -> None:
    """Sample every prompt through the policy."""

    async def all_at_once() -> None:
        sampling = Sampling(max_tokens=NEW)
        await asyncio.gather(*(policy.generate(ids, sampling, seed=seed) for ids in prompts))

    asyncio.run(all_at_once())


def bare(backend: Any, prompts: list[list[int]], seed: int) -> None:
    """Sample every prompt with the engine's own loop, as vLLM's offline `generate` does."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def loop() -> None:
        engine = backend._engine
        for number, ids in enumerate(prompts):
            params = SamplingParams(
                max_tokens=NEW,
                seed=seed,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": ids, "cache_salt": f"bare{seed}"}
            engine.add_request(f"bare{number}", prompt, params)
        while engine.has_unfinished_requests():
            engine.step()

    backend.thread.call(loop)


def timed(work: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def speed(policy: VLLMPolicy, repeats: int) -> None:
    """Compare with the bare engine, and dialogues with and without a warm prefix cache."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 256, (ROWS, PROMPT)).tolist()
    backend: Any = policy.backend
    if hasattr(backend, "thread"):
        pairs = [
            (
                timed(lambda r=r: bare(backend, prompts, r)),  # type: ignore[misc]
                timed(lambda r=r: through_policy(policy, prompts, r)),  # type: ignore[misc]
            )
            for r in range(repeats + 1)
        ][1:]
        ratio = statistics.median(a / b for a, b in pairs)
        rate = ROWS * NEW / statistics.median(b for _, b in pairs)
        print(f"throughput: {rate:.0f} tokens/s, {ratio:.2f} of the bare engine's")

    def dialogues(start: int, *, is_fresh: bool) -> None:
        # A prompt that differs in its first token shares no prefix.
        contexts = [[start % 256, *ids] for ids in prompts]
        for turn in range(TURNS):
            first = (start + turn) % 256 if is_fresh else start % 256
            contexts = [[first, *ids[1:], *prompts[turn][:30]] for ids in contexts]
            asyncio.run(turn_of(contexts))

    async def turn_of(contexts: list[list[int]]) -> None:
        sampling = Sampling(max_tokens=4)
        await asyncio.gather(*(policy.generate(ids, sampling, seed=0) for ids in contexts))

    dialogues(0, is_fresh=True)
    pairs = [
        (
            timed(lambda r=r: dialogues(20 * r + 1, is_fresh=True)),  # type: ignore[misc]
            timed(lambda r=r: dialogues(20 * r + 15, is_fresh=False)),  # type: ignore[misc]
        )
        for r in range(1, repeats + 1)
    ]
    factor = statistics.median(a / b for a, b in pairs)
    print(f"{TURNS} turns of 30 tokens in, 4 out: {factor:.2f} times as fast with the prefix cache")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=50, help="of four trajectories")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 = full weights")
    parser.add_argument("--isolated", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sft", type=int, default=100, help="steps of the cold start")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        folder = make_agent(Path(root), options.sft)
        model, tokenizer = load_model(folder, device="cpu")
        if options.lora:
            model = attach_lora(model, options.lora)
        engine = EngineConfig(kind="vllm", isolated=options.isolated)
        began = time.perf_counter()
        with open_vllm(engine, model_path=folder, lora_rank=options.lora) as policy:
            print(f"ready after {time.perf_counter() - began:.1f} s")
            exactness(policy, model, Renderer(tokenizer), options.groups)
            speed(policy, options.repeats)


if __name__ == "__main__":
    main()
