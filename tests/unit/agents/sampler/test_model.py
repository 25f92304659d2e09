from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from turngym.agents.model import (
    adapters_disabled,
    attach_lora,
    head_of,
    load_model,
    policy_logprobs,
)
from turngym.errors import ConfigError, TrajectoryError

MakeModel = Callable[..., nn.Module]
ROWS = [np.array(ids, np.int32) for ids in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9])]
WHERE = [np.array(t, np.int64) for t in ([1, 2, 4], [1], [7, 3])]


def by_hand(model: nn.Module, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies row by row from full logits."""
    logp, entropy = [], []
    for ids, where in zip(ROWS, WHERE, strict=True):
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        table = (logits.float() / temperature).log_softmax(-1)
        for t in where.tolist():
            logp.append(table[t - 1, int(ids[t])])
            entropy.append(-(table[t - 1].exp() * table[t - 1]).sum())
    return torch.stack(logp), torch.stack(entropy)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite", "cohere", "gpt2", "bloom"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
def test_scores_are_those_of_full_logits(
    family: str, chunk_tokens: int, make_model: MakeModel
) -> None:
    model = make_model(family)
    found = policy_logprobs(
        model, ROWS, WHERE, temperature=0.7, chunk_tokens=chunk_tokens, with_entropy=True
    )
    logp, entropy = by_hand(model, 0.7)
    assert found.entropy is not None
    assert torch.allclose(found.logp, logp, atol=1e-5)
    assert torch.allclose(found.entropy, entropy, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_gradients_are_those_of_full_logits(family: str, make_model: MakeModel) -> None:
    model = make_model(family).double()
    weight = torch.linspace(-1, 1, 6)

    def gradients(logp: Tensor, entropy: Tensor) -> list[Tensor]:
        model.zero_grad()
        torch.autograd.backward((weight * logp + 0.1 * entropy).sum())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    found = policy_logprobs(model, ROWS, WHERE, chunk_tokens=2, with_entropy=True)
    assert found.entropy is not None
    got = gradients(found.logp, found.entropy)
    want = gradients(*by_hand(model))
    assert len(got) == len(want) > 0
    scale = max(float(w.abs().max()) for w in want)
    assert max(float((g - w).abs().max()) for g, w in zip(got, want, strict=True)) < 1e-6 * scale


def test_a_family_with_unknown_post_processing_takes_its_own_logits(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen3")

    class Doubled(cast(Any, type(model))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    model.__class__ = Doubled
    assert head_of(model) is None
    assert "does not declare" in caplog.text
    found = policy_logprobs(model, ROWS, WHERE)
    assert torch.allclose(found.logp, by_hand(model)[0], atol=1e-5)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the largest tensor made while it is on."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_logits_exist_for_one_chunk_at_a_time(make_model: MakeModel) -> None:
    vocab, tokens, chunk = 5000, 180, 16
    model = make_model("llama", vocab_size=vocab)
    row = np.arange(tokens + 1, dtype=np.int32)
    policy_logprobs(model, ROWS, WHERE)
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        found = policy_logprobs(model, [row], [np.arange(1, tokens + 1)], chunk_tokens=chunk)
        torch.autograd.backward(found.logp.sum())
    embedding = vocab * 32
    assert largest.numel == max(embedding, chunk * vocab) < tokens * vocab


def test_filler_and_its_id_change_nothing(make_model: MakeModel) -> None:
    # 0 is the pad id and 2 the end token: both are ordinary tokens here.
    model = make_model("qwen3")
    short = np.array([0, 2, 0, 0, 2], np.int32)
    long = np.arange(30, dtype=np.int32)
    alone = policy_logprobs(model, [short], [np.arange(1, 5)]).logp
    beside = policy_logprobs(model, [short, long], [np.arange(1, 5), np.arange(1, 30)]).logp
    assert torch.allclose(alone, beside[:4], atol=1e-6)


def test_rows_without_positions_cost_nothing_and_return_nothing(make_model: MakeModel) -> None:
    model = make_model("qwen3")
    empty = np.empty(0, np.int64)
    found = policy_logprobs(model, ROWS, [empty, WHERE[1], empty], with_entropy=True)
    assert found.logp.shape == (1,)
    nothing = policy_logprobs(model, ROWS, [empty] * 3, with_entropy=True)
    assert nothing.entropy is not None
    assert nothing.logp.shape == nothing.entropy.shape == (0,)


@pytest.mark.parametrize(
    ("rows", "where", "message"),
    [
        ([[1, 2]], [[0]], r"row 0: positions must lie in 1\.\.1 .*got 0\.\.0"),
        ([[1, 2], [1, 2]], [[1], [2]], r"row 1: positions must lie in 1\.\.1 .*got 2\.\.2"),
        ([[1, 61]], [[1]], "token id 61, outside the model's vocabulary of 61"),
        ([[-1, 3]], [[1]], "token id -1, outside"),
        ([[1, 2]], [], "1 rows and 0 positions"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    rows: list[list[int]], where: list[list[int]], message: str, make_model: MakeModel
) -> None:
    with pytest.raises(TrajectoryError, match=message):
        policy_logprobs(
            make_model("qwen3"),
            [np.array(ids, np.int32) for ids in rows],
            [np.array(t, np.int64) for t in where],
        )


def test_settings_without_meaning_are_refused(make_model: MakeModel) -> None:
    model = make_model("qwen3")
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="temperature"):
            policy_logprobs(model, ROWS, WHERE, temperature=temperature)
    with pytest.raises(ConfigError, match="chunk_tokens"):
        policy_logprobs(model, ROWS, WHERE, chunk_tokens=0)


def test_lora_starts_as_the_model_and_can_be_switched_off(make_model: MakeModel) -> None:
    base = policy_logprobs(make_model("qwen3"), ROWS, WHERE).logp
    model = attach_lora(make_model("qwen3"), 4, targets=["q_proj", "v_proj"])
    assert torch.allclose(policy_logprobs(model, ROWS, WHERE).logp, base, atol=1e-6)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    assert not torch.allclose(policy_logprobs(model, ROWS, WHERE).logp, base, atol=1e-2)
    with adapters_disabled(model):
        assert torch.allclose(policy_logprobs(model, ROWS, WHERE).logp, base, atol=1e-6)


def test_lora_mistakes_are_named(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match="rank must be at least 1, got 0"):
        attach_lora(make_model("qwen3"), 0)
    with pytest.raises(ConfigError, match="q_porj"):
        attach_lora(make_model("qwen3"), 4, targets=["q_porj"])
    with pytest.raises(ConfigError, match="has no adapters"), adapters_disabled(nn.Linear(1, 1)):
        pass


def save(folder: Path, model: Any, words: int) -> None:
    model.save_pretrained(folder)
    vocabulary = {f"w{k}": k for k in range(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_a_saved_model_loads_without_dropout(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    save(tmp_path, model, 61)
    loaded, tokenizer = load_model(tmp_path, device="cpu")
    assert len(tokenizer) == 61
    want = policy_logprobs(model, ROWS, WHERE).logp
    assert torch.allclose(policy_logprobs(loaded.train(), ROWS, WHERE).logp, want, atol=1e-6)


def test_loading_mistakes_are_named(tmp_path: Path, make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"from folder .*cannot|cannot load .*folder"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="dtype must be a torch float type"):
        load_model(tmp_path, dtype="int64")
    save(tmp_path, make_model("qwen3"), 62)
    with pytest.raises(ConfigError, match="62 ids, its model only 61"):
        load_model(tmp_path)


@pytest.mark.parametrize("path", ["qwen", "./runs/policy", "/no/where", "runs/one/policy"])
def test_a_path_that_is_no_folder_is_not_looked_up_on_the_hub(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", look_up)
    with pytest.raises(ConfigError, match=rf"no folder '{path}' here.*owner/name"):
        load_model(path)
    with pytest.raises(AssertionError, match="was asked"):
        load_model("owner/a-model_1.5")


def test_adapters_begin_with_seeded_weights_and_leave_the_global_generator_alone(
    make_model: Callable[..., Any],
) -> None:
    def adapters(seed: int) -> list[float]:
        adapted = attach_lora(make_model("llama"), 2, seed=seed)
        return [float(p.detach().sum()) for p in adapted.parameters() if p.requires_grad]

    torch.manual_seed(5)
    expected = float(torch.rand(()))
    first, other = adapters(1), adapters(2)
    torch.manual_seed(5)
    attached = make_model("llama")
    torch.manual_seed(5)
    attach_lora(attached, 2, seed=1)
    assert float(torch.rand(())) == expected
    assert first == adapters(1) != other
