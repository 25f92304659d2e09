"""How much memory a run takes, before anything is loaded: for choosing a recipe.

Activations are what the HF decoders of Qwen and Llama keep for the backward pass with fused
attention and no recomputation, measured through saved-tensor hooks: per token and layer
8 * hidden + 4 * mlp + 5 * (query + key) values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["SHAPES", "Memory", "Shape", "estimate"]

GIB = 1 << 30

HEAD_GIB = 1.5
"""Logits of a chunk, their softmax and its gradient, on a GPU."""

CONTEXT_GIB = 1.5
"""What CUDA, its kernels and captured graphs take in each process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama-type decoder: grouped-query attention and a gated MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    is_tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """Read the `config.json` of a model."""
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp=config["intermediate_size"],
            vocab=config["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads; values have the same."""
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Weights of the matrices; norms and biases are left out (under 0.1 %)."""
        layer = 2 * self.hidden * (self.query + self.key) + 3 * self.hidden * self.mlp
        return self.layers * layer + (1 if self.is_tied else 2) * self.vocab * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Weights of adapters on all linear layers of the decoder."""
        attention = 2 * (2 * self.hidden + self.query + self.key)
        return self.layers * rank * (attention + 3 * (self.hidden + self.mlp))


SHAPES: Mapping[str, Shape] = {
    name: Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        mlp=mlp,
        vocab=vocab,
        is_tied=is_tied,
    )
    for name, layers, hidden, heads, kv_heads, mlp, vocab, is_tied in (
        ("Qwen/Qwen3-0.6B", 28, 1024, 16, 8, 3072, 151936, True),
        ("Qwen/Qwen2.5-1.5B-Instruct", 28, 1536, 12, 2, 8960, 151936, True),
        ("Qwen/Qwen2.5-3B-Instruct", 36, 2048, 16, 2, 11008, 151936, True),
        ("Qwen/Qwen3-4B", 36, 2560, 32, 8, 9728, 151936, True),
        ("Qwen/Qwen2.5-7B-Instruct", 28, 3584, 28, 4, 18944, 152064, False),
        ("Qwen/Qwen3-8B", 36, 4096, 32, 8, 12288, 151936, False),
    )
}
"""Shapes of models that there are recipes for, as in their `config.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """GiB on the GPU, by what takes them."""

    weights: float
    """The trainer's model, and the reference where there is one."""

    optimizer: float
    """Gradients and AdamW's two moments of what trains."""

    activations: float
    """One micro-batch, and the chunk of logits."""

    engine: float
    """vLLM's copy of the weights, in bfloat16."""

    cache: float
    """Keys and values of all trajectories in flight at full length, in bfloat16."""

    @property
    def trainer(self) -> float:
        """Of the trainer's process."""
        return self.weights + self.optimizer + self.activations + CONTEXT_GIB

    @property
    def sampler(self) -> float:
        """Of the engine's process."""
        return self.engine + self.cache + CONTEXT_GIB


def estimate(
    shape: Shape,
    *,
    dtype: Literal["float32", "bfloat16"],
    lora_rank: int = 0,
    micro_tokens: int,
    concurrency: int,
    context: int,
    reference: bool = False,
) -> Memory:
    """Estimate the memory of a run whose engine is vLLM.

    Args:
        shape: the model.
        dtype: of the trainer's weights, gradients and moments (`model.dtype`).
        lora_rank: 0 = all weights train.
        micro_tokens: tokens of a forward pass (`optim.micro_tokens`).
        concurrency: trajectories in flight (`rollout.concurrency`).
        context: tokens that each may hold (`rollout.max_context`).
        reference: a frozen copy is kept for a KL term; adapters need none.
    """
    size = 4 if dtype == "float32" else 2
    trained = shape.adapter_parameters(lora_rank) if lora_rank else shape.parameters
    copies = 2 if reference and not lora_rank else 1
    a_token = shape.layers * (8 * shape.hidden + 4 * shape.mlp + 5 * (shape.query + shape.key))
    return Memory(
        weights=(copies * shape.parameters + (trained if lora_rank else 0)) * size / GIB,
        optimizer=3 * trained * size / GIB,
        activations=micro_tokens * a_token * size / GIB + HEAD_GIB,
        engine=2 * shape.parameters / GIB,
        cache=concurrency * context * 4 * shape.layers * shape.key / GIB,
    )
