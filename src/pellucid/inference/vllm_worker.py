"""Methods of vLLM's workers beyond vLLM's: they load published weights, and digest each tensor on its way.

vLLM adds the methods of `PublishedWeights` to its worker, in whichever process that runs. The tensors come
from a file that each worker reads, or through vLLM's weight-transfer engine (`transport.weights_transfer`).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from pellucid.transport.weights import digest_of, read_weights


class PublishedWeights:
    device: torch.device
    model_config: Any
    model_runner: Any
    reload_weights: Any
    weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def load_published(self, folder: str) -> dict[str, str]:
        """Loads the weights; each worker reads the whole file and keeps its shard.

        Returns the digests of the tensors that vLLM took.
        """
        digests: dict[str, str] = {}
        self._prepare()
        self.reload_weights(weights_iterator=_digested(read_weights(Path(folder)), digests))
        self._pack_tied_head()
        return digests

    def start_transfer(self) -> None:
        self._prepare()
        self.start_weight_update()

    def receive_published(self, update_info: Any) -> dict[str, str]:
        """Takes one update from the trainer; returns the digests of its tensors, as they arrived."""
        digests: dict[str, str] = {}
        model = self.weight_transfer_engine.model
        load = model.load_weights
        model.load_weights = lambda weights: load(_digested(weights, digests))
        try:
            self.update_weights(update_info)
        finally:
            del model.load_weights  # the class's own is found again
        return digests

    def finish_transfer(self) -> None:
        self.finish_weight_update()
        self._pack_tied_head()

    def _prepare(self) -> None:
        if self.device.type == "cpu":
            forget_expert_kernels(self.model_runner.get_model())

    def _pack_tied_head(self) -> None:
        """Prepares a tied head again, as vLLM does with what it has loaded: it loads nothing of its own. On a
        CPU it multiplies with a packed copy of the embedding, which would stay as it was."""
        if self.model_config.hf_text_config.tie_word_embeddings:
            head = self.model_runner.get_model().lm_head
            head.quant_method.process_weights_after_loading(head)


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Makes vLLM pad and pack the experts that it loads next as its kernel for CPUs reads them, which it does
    where there is no kernel yet: for the first weights alone."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _digested(
    weights: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes tensors on, and notes the digest of each before it is handed over."""
    for name, tensor in weights:
        digests[name] = digest_of(tensor)
        yield name, tensor
