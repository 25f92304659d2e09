"""The fast decoder: Llama-type models as a function of their weights.

Same arithmetic as the modules of transformers, with the projections of one input fused and no work
done per call that can be done per version of the weights. Measured in `benchmarks/sampler.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from turngym.agents.decode import KVBuffers, Step
from turngym.agents.model import decoder_of, head_of, linear

__all__ = ["FastDecoder", "has_fast_path"]

_FAMILIES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def has_fast_path(model: nn.Module) -> bool:
    """Tell whether `FastDecoder` knows the model's architecture."""
    decoder = cast(Any, decoder_of(model))
    config = decoder.config
    if type(decoder).__name__ not in _FAMILIES or head_of(model) is None:
        return False
    kinds = getattr(config, "layer_types", None)
    has_window = (
        set(kinds) != {"full_attention"} if kinds else getattr(config, "sliding_window", None)
    )
    rope = getattr(config, "rope_parameters", None) or {}
    if has_window or rope.get("rope_type", "default") not in _FIXED_ROPE:
        return False
    if type(decoder.embed_tokens) is not nn.Embedding:
        return False
    return all(
        _is_linear(projection)
        for layer in decoder.layers
        for projection in (*_attention(layer), *_mlp(layer))
    )


def _attention(layer: Any) -> tuple[Any, ...]:
    part = layer.self_attn
    return part.q_proj, part.k_proj, part.v_proj, part.o_proj


def _mlp(layer: Any) -> tuple[Any, ...]:
    return layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj


def _is_linear(module: Any) -> bool:
    """A linear map, possibly with plain LoRA on it (DoRA and LoRA biases are not plain)."""
    if type(module) is nn.Linear:
        return True
    return (
        type(getattr(module, "base_layer", None)) is nn.Linear
        and hasattr(module, "get_delta_weight")
        and not getattr(module, "lora_magnitude_vector", None)
        and not any(getattr(module, "lora_bias", {}).values())
    )


def _effective(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a linear map with its active adapters merged in."""
    if type(module) is nn.Linear:
        return module.weight, module.bias
    weight = module.base_layer.weight
    if not (module.merged or module.disable_adapters):
        for adapter in module.active_adapters:
            if adapter in module.lora_A:
                weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
    return weight, module.base_layer.bias


def _fused(*modules: Any) -> tuple[Tensor, Tensor | None]:
    weights, biases = zip(*(_effective(module) for module in modules), strict=True)
    bias = None if biases[0] is None else torch.cat(biases)
    return torch.cat(weights), bias


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    head_norm: Tensor | None
    """Weights of the norm of queries and keys, (heads + kv_heads, head_dim)."""
    out: tuple[Tensor, Tensor | None]
    mlp_norm: Tensor
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    activation: Callable[[Tensor], Tensor]


class FastDecoder:
    """Decodes Llama, Mistral (without window), Qwen2 and Qwen3 models, with or without LoRA.

    Args:
        model: a model for which `has_fast_path` holds.
        max_context: positions to prepare.
    """

    mode = torch.inference_mode

    def __init__(self, model: nn.Module, max_context: int) -> None:
        head = head_of(model)
        assert head is not None
        self.head = head
        self._decoder = cast(Any, decoder_of(model))
        config = self._decoder.config
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._eps = float(config.rms_norm_eps)
        self._scale = float(self._decoder.layers[0].self_attn.scaling)
        self._buffers = KVBuffers()
        self.reserve, self.move = self._buffers.reserve, self._buffers.move
        self._max_context = max_context
        self.refresh()

    @property
    def token_bytes(self) -> int:
        """Bytes one token of one slot takes in the buffers."""
        return self._buffers.token_bytes

    @torch.no_grad()
    def refresh(self) -> None:
        """Fuse and merge the current weights."""
        self._layers = [self._read(layer) for layer in self._decoder.layers]
        embedding = self._decoder.embed_tokens.weight
        positions = torch.arange(self._max_context, device=embedding.device)
        cos, sin = self._decoder.rotary_emb(embedding[:1, None], positions[None])
        half = cos.shape[-1] // 2
        self._cos = cos[0][:, None]
        # The sign of "rotate half" lives in the table, so that a roll does the rotation.
        self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)[:, None]

    def _read(self, layer: Any) -> _Layer:
        part = layer.self_attn
        head_norm = None
        if hasattr(part, "q_norm"):
            queries = part.q_norm.weight.expand(self._heads, -1)
            head_norm = torch.cat([queries, part.k_norm.weight.expand(self._kv_heads, -1)])
        return _Layer(
            norm=layer.input_layernorm.weight,
            qkv=_fused(part.q_proj, part.k_proj, part.v_proj),
            head_norm=head_norm,
            out=_effective(part.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=_fused(layer.mlp.gate_proj, layer.mlp.up_proj),
            down=_effective(layer.mlp.down_proj),
            activation=layer.mlp.act_fn,
        )

    def forward(self, step: Step) -> Tensor:
        """Run the tokens of a step; return the hidden state of each row's last one, (B, d)."""
        x = F.embedding(step.ids, self._decoder.embed_tokens.weight)
        rotation = self._cos[step.positions], self._sin[step.positions]
        bias = step.bias(x.dtype)
        mask = self._spread(bias)
        for index, layer in enumerate(self._layers):
            queries, keys, values = self._project(layer, self._norm(x, layer.norm), rotation)
            keys, values = self._buffers.store(index, step, keys, values)
            if index == len(self._layers) - 1 and x.shape[1] > 1:
                # Past the last layer's keys and values only the last tokens are of use.
                rows = torch.arange(len(x), device=x.device)
                x, queries, bias = (t[rows, step.last][:, None] for t in (x, queries, bias))
                mask = self._spread(bias)
            x = x + linear(self._attend(queries, keys, values, mask), *layer.out)
            gate, up = linear(self._norm(x, layer.mlp_norm), *layer.gate_up).chunk(2, dim=-1)
            x = x + linear(layer.activation(gate) * up, *layer.down)
        return self._norm(x[:, 0], self._decoder.norm.weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _spread(self, bias: Tensor) -> Tensor:
        """Repeat a mask (B, T, span) for every query head: (B * kv_heads, groups * T, span)."""
        groups = self._heads // self._kv_heads
        bias = bias[:, None, None].expand(-1, self._kv_heads, groups, -1, -1)
        return bias.flatten(0, 1).flatten(1, 2)

    def _project(
        self, layer: _Layer, x: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, heads, d), keys and values (B, kv_heads, T, d)."""
        turned = self._heads + self._kv_heads
        qkv = linear(x, *layer.qkv).view(*x.shape[:2], turned + self._kv_heads, -1)
        qk, values = torch.split(qkv, [turned, self._kv_heads], dim=2)
        if layer.head_norm is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, self._eps) * layer.head_norm
        qk = torch.addcmul(qk * rotation[0], qk.roll(qk.shape[-1] // 2, -1), rotation[1])
        queries, keys = torch.split(qk, [self._heads, self._kv_heads], dim=2)
        return queries, keys.transpose(1, 2), values.transpose(1, 2)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return mixed values, (B, T, heads * d); queries that share a key head are one matrix."""
        rows, length, _, width = queries.shape
        queries = queries.view(rows, length, self._kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(rows * self._kv_heads, -1, width)
        scores = torch.baddbmm(mask, queries, keys.flatten(0, 1).transpose(1, 2), alpha=self._scale)
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        mixed = torch.bmm(weights, values.flatten(0, 1))
        mixed = mixed.view(rows, self._kv_heads, -1, length, mixed.shape[-1])
        return mixed.permute(0, 3, 1, 2, 4).reshape(rows, length, -1)
