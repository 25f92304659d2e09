import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn

from turngym.agents.model import attach_lora, load_model, policy_logprobs
from turngym.agents.tiny import build_tiny_agent
from turngym.errors import ConfigError, MissingDependencyError

ROWS = [np.array([3, 1, 4, 1, 5], np.int32)]
WHERE = [np.array([1, 2, 3, 4], np.int64)]


def scores(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return policy_logprobs(model, ROWS, WHERE).logp


def save_adapter(base: str | Path, folder: Path, *, with_tokenizer: bool = True) -> Tensor:
    """Write an adapter that changes its base; returns the scores under it."""
    model, tokenizer = load_model(base, device="cpu")
    adapted = attach_lora(model, 2)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    cast(Any, adapted).save_pretrained(folder, save_embedding_layers=False)
    if with_tokenizer:
        tokenizer.save_pretrained(folder)
    return scores(adapted)


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_an_adapter_folder_loads_as_its_merged_model(tmp_path: Path, with_tokenizer: bool) -> None:
    base = build_tiny_agent(tmp_path / "tiny")
    want = save_adapter(base, tmp_path / "run", with_tokenizer=with_tokenizer)
    assert not (tmp_path / "run" / "config.json").exists()
    model, tokenizer = load_model(tmp_path / "run", device="cpu")
    plain, its_tokenizer = load_model(base, device="cpu")
    assert torch.allclose(scores(model), want, atol=1e-5)
    assert not torch.allclose(scores(plain), want, atol=1e-2)
    assert tokenizer.get_vocab() == its_tokenizer.get_vocab()
    assert tokenizer.chat_template == its_tokenizer.chat_template
    assert type(model) is type(plain)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_adapter_trained_on_an_adapter_loads_with_both(tmp_path: Path) -> None:
    save_adapter(build_tiny_agent(tmp_path / "tiny"), tmp_path / "first")
    want = save_adapter(tmp_path / "first", tmp_path / "second")
    assert torch.allclose(scores(load_model(tmp_path / "second", device="cpu")[0]), want, atol=1e-5)


def test_a_relative_base_is_found_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build_tiny_agent("models/tiny")
    want = save_adapter("models/tiny", Path("runs/one/model"))
    monkeypatch.chdir("/")
    model = load_model(tmp_path / "runs" / "one" / "model", device="cpu")[0]
    assert torch.allclose(scores(model), want, atol=1e-5)


@pytest.mark.parametrize("place", ["run/model/base", "run/base", "base"])
def test_a_base_moved_beside_its_adapter_is_found(tmp_path: Path, place: str) -> None:
    base = build_tiny_agent(tmp_path / "tiny")
    want = save_adapter(base, tmp_path / "run" / "model")
    shutil.move(base, tmp_path / place)
    model = load_model(tmp_path / "run" / "model", device="cpu")[0]
    assert torch.allclose(scores(model), want, atol=1e-5)


def test_a_base_that_cannot_be_found_is_named_with_its_adapter(tmp_path: Path) -> None:
    base = build_tiny_agent(tmp_path / "tiny")
    save_adapter(base, tmp_path / "run")
    shutil.rmtree(base)
    with pytest.raises(ConfigError, match="base_model_name_or_path") as caught:
        load_model(tmp_path / "run")
    assert str(base) in str(caught.value)
    assert str(tmp_path / "run") in str(caught.value)


def test_an_adapter_that_does_not_fit_or_names_no_base_is_refused(
    tmp_path: Path, make_model: Any
) -> None:
    save_adapter(build_tiny_agent(tmp_path / "tiny"), tmp_path / "run")
    settings = tmp_path / "run" / "adapter_config.json"
    kept = json.loads(settings.read_text())
    make_model("qwen3").save_pretrained(tmp_path / "other")
    load_model(tmp_path / "tiny")[1].save_pretrained(tmp_path / "other")
    settings.write_text(json.dumps(kept | {"base_model_name_or_path": "../other"}))
    with pytest.raises(ConfigError, match="does not fit its base"):
        load_model(tmp_path / "run")
    settings.write_text(json.dumps(kept | {"base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="has no base_model_name_or_path"):
        load_model(tmp_path / "run")


def test_an_adapter_without_peft_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(build_tiny_agent(tmp_path / "tiny"), tmp_path / "run")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"turngym\[peft\]"):
        load_model(tmp_path / "run")


def test_an_adapter_that_is_not_a_change_of_weights_is_refused(tmp_path: Path) -> None:
    base = build_tiny_agent(tmp_path / "tiny")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prompted = peft.get_peft_model(cast(Any, load_model(base, device="cpu")[0]), config)
        prompted.save_pretrained(tmp_path / "run")
    with pytest.raises(ConfigError, match="type PROMPT_TUNING cannot be merged"):
        load_model(tmp_path / "run")
