"""The policy: an HF causal language model behind the one forward that trainer and engine share."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pellucid.model.attention import AttentionPlan
from pellucid.model.head import TokenOutput, predict, unpredicted
from pellucid.model.layout import Layout


class Policy(nn.Module):
    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    @property
    def vocab_size(self) -> int:
        return int(self.hf.get_output_embeddings().weight.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.hf.config.get_text_config().num_attention_heads)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        return list(self.hf.base_model.layers)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def checkpoint_activations(self, *, is_random: bool = False) -> None:
        """From now on each layer keeps its input alone for the backward pass, and computes the rest again.

        `is_random`: something is drawn in a forward, which has to be drawn again as it was.
        """
        for layer in self.layers:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=is_random
            )

    def hidden(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Last hidden states; ids and positions are [batch, tokens]."""
        output = self.hf.base_model(input_ids=token_ids, position_ids=positions, use_cache=False, plan=plan)
        states: Tensor = output.last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.hf.get_output_embeddings()(hidden)
        return logits

    def predict(self, hidden: Tensor, token_ids: Tensor, temperatures: Tensor, layout: Layout) -> TokenOutput:
        """Of the rows of `layout.predicted`, given the hidden states of `layout.computed`."""
        head, predicted = self.hf.get_output_embeddings(), layout.predicted
        return predict(
            hidden[layout.predecessors],
            head.weight,
            getattr(head, "bias", None),
            token_ids[predicted],
            temperatures[predicted],
            layout.read,
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, temperatures: Tensor, layout: Layout
    ) -> TokenOutput:
        """Logprob and entropy of every token of packed sequences; all arguments are one row of tokens.

        A token is predicted by the hidden state of the token before it, at its own temperature.
        """
        computed = layout.computed
        hidden = self.hidden(token_ids[computed][None], positions[computed][None], layout.plan)[0]
        output = self.predict(hidden, token_ids, temperatures, layout)
        if layout.own is not None:
            output = layout.own.gather(output)
        first = unpredicted(len(token_ids), self.vocab_size, token_ids.device)
        return TokenOutput(
            first.logprobs.index_put((layout.told,), output.logprobs[layout.sources]),
            first.entropy.index_put((layout.told,), output.entropy[layout.sources]),
        )
