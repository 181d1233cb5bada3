"""A mixin for vLLM's workers that loads published weights into the model, in place."""

from pathlib import Path
from typing import Any

from pellucid.transport.weights import read_weights


class PublishedWeights:
    model_config: Any
    model_runner: Any
    reload_weights: Any

    def load_published(self, folder: str) -> None:
        """Loads the weights; each worker reads the whole file and keeps its shard."""
        self.reload_weights(weights_iterator=read_weights(Path(folder)))
        if self.model_config.hf_text_config.tie_word_embeddings:
            # vLLM prepares again what it has loaded, and a tied head loads nothing of its own. On a CPU it
            # multiplies with a packed copy of the embedding, which would stay as it was.
            head = self.model_runner.get_model().lm_head
            head.quant_method.process_weights_after_loading(head)
