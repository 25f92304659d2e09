"""HFPolicy against `generate` of transformers: same model, same rows, same number of tokens.

    python benchmarks/sampler.py --rows 128 --repeats 5

Both sides run on one thread in turns (A, B, A, B, ...); times are CPU seconds of the process, which
a busy machine disturbs less than wall time, and ratios are medians over the pairs. Multi-turn:
every row takes several turns with a tool result in between; `generate` runs the turns of all rows
in lock step and prefills the whole context each time, as trainers built on it do. HFPolicy returns
log-probabilities; `generate` does not unless `--logprobs` asks it for what a learner needs.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3Config, Qwen3ForCausalLM

from turngym.agents.base import Sampling
from turngym.agents.hf_policy import HFPolicy

Ids = NDArray[np.int64]
VOCAB = 163
PROMPT, NEW, RESULT = 20, 32, 12
"""Tokens of the prompt, of a turn and of a tool result: the sizes of the calculator task."""


def tiny_model() -> Qwen3ForCausalLM:
    """Return the model of the demo job, 182,080 parameters, with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        intermediate_size=192,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def prompts(rows: int, *, shared: int) -> Ids:
    """Return prompts of which `shared` rows each are equal (the samples of one task)."""
    rng = np.random.default_rng(0)
    distinct = rng.integers(1, VOCAB, (rows // shared, PROMPT))
    return np.repeat(distinct, shared, axis=0)


def run_policy(policy: HFPolicy, contexts: Ids, turns: int, result: Ids) -> int:
    """Roll all rows out, each at its own pace; return the tokens sampled."""
    sampling = Sampling(max_tokens=NEW)

    async def row(index: int) -> int:
        ids = contexts[index].tolist()
        count = 0
        for turn in range(turns):
            completion = await policy.generate(
                ids, sampling, seed=index * 1000 + turn, session=f"row{index}"
            )
            ids = [*ids, *completion.ids.tolist(), *result.tolist()]
            count += len(completion.ids)
        policy.release(f"row{index}")
        return count

    async def rows() -> int:
        return sum(await asyncio.gather(*(row(index) for index in range(len(contexts)))))

    return asyncio.run(rows())


def run_generate(
    model: Qwen3ForCausalLM, contexts: Ids, turns: int, result: Ids, *, logprobs: bool
) -> int:
    """Roll all rows out with `generate`, turn by turn; return the tokens sampled."""
    ids = torch.from_numpy(contexts)
    tail = torch.from_numpy(result).expand(len(contexts), -1)
    count = 0
    for _ in range(turns):
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=NEW,
                return_dict_in_generate=True,
                output_scores=logprobs,
            )
            if logprobs:
                model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        count += out.sequences.numel() - ids.numel()
        ids = torch.cat([out.sequences, tail], dim=1)
    return count


def compare(name: str, ours: Callable[[], int], theirs: Callable[[], int], repeats: int) -> None:
    """Time both in turns and print the medians."""
    ours()
    theirs()
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats):
        pair = []
        for side in (ours, theirs):
            start = time.process_time()
            count = side()
            pair.append(time.process_time() - start)
        seconds.append((pair[0], pair[1]))
    a, b = (statistics.median(side) for side in zip(*seconds, strict=True))
    ratios = [theirs_s / ours_s for ours_s, theirs_s in seconds]
    print(
        f"{name:28} HFPolicy {count / a:9,.0f} tok/s   generate {count / b:9,.0f} tok/s   "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--logprobs", action="store_true", help="also from generate")
    parser.add_argument("--generic", action="store_true", help="without the functional decoder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model()
    result = np.random.default_rng(1).integers(1, VOCAB, RESULT)
    with HFPolicy(model, max_rows=options.rows, fast=not options.generic, threads=1) as policy:
        for shared in (1, 8):
            contexts = prompts(options.rows, shared=shared)
            for turns in (1, options.turns):
                compare(
                    f"{turns} turn(s), {shared} equal prompts",
                    partial(run_policy, policy, contexts, turns, result),
                    partial(
                        run_generate, model, contexts, turns, result, logprobs=options.logprobs
                    ),
                    options.repeats,
                )


if __name__ == "__main__":
    main()
