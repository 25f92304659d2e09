"""What turngym adds to a vLLM worker: taking a trainer's weights.

Start an engine or a server with
`--worker-extension-cls turngym.agents.vllm_worker.WeightReceiver`, then call its methods through
`collective_rpc`. vLLM imports this module inside its workers; nothing else does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["WeightReceiver"]


class WeightReceiver:
    """Mixed into vLLM's worker class; its names are prefixed so as not to meet vLLM's."""

    model_runner: Any
    vllm_config: Any

    def turngym_load(self, named: Sequence[tuple[str, Tensor]], version: int) -> int:
        """Take full weights under their names in the trainer's model; return the version in use.

        vLLM keeps weights in kernel layouts, so they are loaded layer by layer in checkpoint
        layout and processed again. A head tied to the embeddings has a processed copy of its own
        that this does not reach: it is made anew from the embeddings afterwards.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.model
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(iter(named))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            for module in model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    self.turngym_repack(module)
        self._turngym_version = version
        return version

    def turngym_load_file(self, path: str, version: int) -> int:
        """`turngym_load` of a safetensors file that this worker can open."""
        from safetensors.torch import load_file

        return self.turngym_load(list(load_file(path).items()), version)

    def turngym_repack(self, module: Any) -> None:
        """Process an embedding or a head after its weights changed."""
        if hasattr(module.quant_method, "process_weights_after_loading"):
            module.quant_method.process_weights_after_loading(module)

    def turngym_version(self) -> int:
        """Policy version of the weights in use; 0 = those the engine was started with."""
        return getattr(self, "_turngym_version", 0)
