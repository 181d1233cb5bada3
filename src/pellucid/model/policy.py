"""The policy: an HF causal language model whose attention follows a plan, for trainer and engine alike."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pellucid.errors import ModelError
from pellucid.model.attention import AttentionPlan
from pellucid.model.head import MAX_LOGITS, TokenOutput, predict
from pellucid.model.layout import Layout
from pellucid.model.routing import ExpertReplay

NOT_YET = "pellucid cannot train or serve this model yet: see docs/models.md for those that it can"


class Policy(nn.Module):
    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf
        self.replay: ExpertReplay | None = None
        """Sends tokens to the experts that each forward is given; None without router replay."""

        self.max_logits = MAX_LOGITS
        """Logits that may be in memory at once; more are computed in chunks."""

    @property
    def vocab_size(self) -> int:
        return int(self.hf.get_output_embeddings().weight.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.hf.config.get_text_config().num_attention_heads)

    @property
    def layers(self) -> list[nn.Module]:
        num_layers = self.hf.config.get_text_config().num_hidden_layers
        for module in self.hf.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == num_layers:
                return list(module)
        raise ModelError(
            f"{type(self.hf).__name__} has no list of its {num_layers} decoder layers; {NOT_YET}"
        )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def checkpoint_activations(self, *, is_random: bool = False) -> None:
        """Makes each layer keep only its input for the backward pass, which computes the rest again.

        `is_random` says that the forward draws random numbers (dropout), which the backward pass must repeat.
        """

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return (nullcontext(), nullcontext()) if self.replay is None else self.replay.contexts()

        for layer in self.layers:
            layer.forward = partial(
                checkpoint,
                layer.forward,
                use_reentrant=False,
                preserve_rng_state=is_random,
                context_fn=contexts,
            )

    def replay_experts(self) -> None:
        """Makes every forward send tokens to the experts that it is given, not to those of the routers."""
        self.replay = ExpertReplay(self.hf)

    def hidden(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Computes the last hidden states; ids and positions are [batch, tokens]."""
        output = self.hf.base_model(input_ids=token_ids, position_ids=positions, use_cache=False, plan=plan)
        states: Tensor = output.last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.hf.get_output_embeddings()(hidden)
        return logits

    def predict(self, hidden: Tensor, token_ids: Tensor, temperatures: Tensor, layout: Layout) -> TokenOutput:
        """Predicts the tokens of `layout.predicted` from the hidden states of `layout.computed`."""
        head, predicted = self.hf.get_output_embeddings(), layout.predicted
        return predict(
            hidden[layout.predecessors],
            head.weight,
            getattr(head, "bias", None),
            token_ids[predicted],
            temperatures[predicted],
            layout.read,
            max_logits=self.max_logits,
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        temperatures: Tensor,
        layout: Layout,
        routed_experts: Tensor | None = None,
    ) -> TokenOutput:
        """Computes logprob and entropy of every token of packed sequences; arguments are one row of tokens.

        A token is predicted by the hidden state of the token before it, at its own temperature.
        """
        hidden, replaced = self._compute(token_ids, positions, layout, routed_experts)
        output = self.predict(hidden, token_ids, temperatures, layout)._replace(replaced=replaced)
        if layout.own is not None:
            output = layout.own.gather(output)

        def of_all(predicted: Tensor, unpredicted: float) -> Tensor:
            whole = torch.full((len(token_ids),), unpredicted, device=token_ids.device)
            return whole.index_put((layout.targets,), predicted[layout.sources])

        uniform = math.log(self.vocab_size)  # the first token of a sequence has no prediction
        return TokenOutput(
            of_all(output.logprobs, -uniform),
            of_all(output.entropy, uniform),
            None if output.replaced is None else of_all(output.replaced, 0.0),
        )

    def _compute(
        self, token_ids: Tensor, positions: Tensor, layout: Layout, routed_experts: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes hidden states of `layout.computed`, and the share of replaced experts per prediction."""
        computed = layout.computed
        ids, places = token_ids[computed][None], positions[computed][None]
        if self.replay is None or routed_experts is None:
            return self.hidden(ids, places, layout.plan)[0], None
        with self.replay.of(routed_experts[computed]) as replayed:
            hidden = self.hidden(ids, places, layout.plan)[0]
        return hidden, replayed.share_replaced()[layout.predecessors]
