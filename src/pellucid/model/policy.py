"""The policy: an HF causal language model whose attention follows a plan, for trainer and engine alike."""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pellucid.data.images import ImageShape
from pellucid.errors import ModelError
from pellucid.model.attention import AttentionPlan, SharedAttention, register_uncompiled
from pellucid.model.balance import ExpertBalance, count_experts, predicting
from pellucid.model.head import TokenOutput, capped, predict
from pellucid.model.images import ImageInputs, embed
from pellucid.model.layout import Layout
from pellucid.model.linear import speed_up
from pellucid.model.routing import ExpertReplay
from pellucid.model.rows import PaddedRows

_ROUTED = ("Experts", "Router")
"""Ends of the names of HF's modules that send tokens to experts."""

NOT_YET = "pellucid cannot train or serve this model yet: see docs/models.md for those that it can"


Way = Literal["packed", "rows"]


def without_cache(model: Any) -> dict[str, bool]:
    """Returns the options of a forward that keeps no cache: none for a model that has no caches."""
    return {"use_cache": False} if _takes_cache(type(model).forward) else {}


@cache
def _takes_cache(forward: Callable[..., Any]) -> bool:
    return "use_cache" in inspect.signature(forward).parameters


class Traits(NamedTuple):
    """Findings of the proof at load about a model; processes without weights are told."""

    way: Way
    why_rows: str
    attention: str
    """HF's name of the attention that computes."""

    windows: dict[int, int]
    logit_factor: float
    logit_softcap: float | None


class Policy(nn.Module):
    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf
        self.replay: ExpertReplay | None = None
        """Sends tokens to the experts that each forward is given; None without router replay."""

        self.balance: ExpertBalance | None = None
        """Computes the balancing loss of the experts; None without one."""

        self.images = ImageShape.of(hf.config)
        """How images become tokens; None if the model takes text alone."""

        self.compute_dtype: torch.dtype | None = None
        """Dtype that parameters are cast to in a forward, after `compute_in`; None: they stay as they are."""

        self.way: Way = "packed"
        """How sequences go through the model: side by side in one row, with a plan that masks attention, or
        each in a row of its own through HF's own attention."""

        self.why_rows = ""
        """Why sequences are not packed, if they are not."""

        self.windows: dict[int, int] = {}
        """Keys that a token sees at most, its own included, in each layer with a sliding window."""

        self.logit_factor = 1.0
        """Number that the family multiplies its logits with."""

        self.logit_softcap: float | None = None
        """Bound that the family's logits approach: cap · tanh(logit / cap); None: they have none."""

        self.max_logits: int | None = None
        """Logits that may be in memory at once; more are computed in chunks. None: by the device's memory."""

        self.read_through_head()

    def read_through_head(self) -> None:
        """Makes the head predict as `_read_head` does; called again once an adapter has taken its place."""
        head = self.hf.get_output_embeddings()
        head.forward = partial(self._read_head, head.forward)

    def speed_up(self) -> None:
        """Has the linear layers multiply by the library that is faster on this CPU."""
        speed_up(self.hf)
        self.read_through_head()

    @property
    def vocab_size(self) -> int:
        return int(self.hf.get_output_embeddings().weight.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.hf.config.get_text_config().num_attention_heads)

    @property
    def layers(self) -> list[nn.Module]:
        num_layers = self.hf.config.get_text_config().num_hidden_layers
        for module in self.decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == num_layers:
                return list(module)
        raise ModelError(
            f"{type(self.hf).__name__} has no list of its {num_layers} decoder layers; {NOT_YET}"
        )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def traits(self) -> Traits:
        return Traits(
            self.way, self.why_rows, self.attention, self.windows, self.logit_factor, self.logit_softcap
        )

    @traits.setter
    def traits(self, traits: Traits) -> None:
        self.way, self.why_rows, self.attention, self.windows, self.logit_factor, self.logit_softcap = traits

    @property
    def attention(self) -> str:
        """HF's name of the attention that computes, and of the masks that are built for it; images aside."""
        return str((self.hf.config if self.images is None else self.decoder.config)._attn_implementation)

    @attention.setter
    def attention(self, name: str) -> None:
        if self.hf._can_set_attn_implementation():
            self.hf.set_attn_implementation(name if self.images is None else {"text_config": name})
        else:  # it attends by code of its own; only masks are made by the name
            self.hf.config._attn_implementation = name

    @property
    def base(self) -> Any:
        """The model without its head."""
        return self.hf.model if self.hf.base_model is self.hf else self.hf.base_model

    @property
    def decoder(self) -> Any:
        """The part of `base` that computes tokens from their embeddings."""
        return self.base if self.images is None else self.base.text_model

    def go_in_rows(self, why: str) -> None:
        self.way, self.why_rows, self.windows = "rows", why, {}

    def compute_in(self, dtype: torch.dtype) -> None:
        """Makes every forward compute in `dtype`, and every gradient add up in the dtype of its parameter.

        Each layer, and the rest around the layers, casts its parameters while it computes, as FSDP does. So
        one process has the values of several.
        """
        self.compute_dtype = dtype
        in_layers = {parameter for layer in self.layers for parameter in layer.parameters()}
        for module in (*self.layers, self):
            slots = [
                (part, name, parameter)
                for part in module.modules()
                for name, parameter in part.named_parameters(recurse=False)
                if module is not self or parameter not in in_layers
            ]
            module.forward = self._casting(module.forward, slots)

    def _casting(
        self, forward: Callable[..., Any], slots: Sequence[tuple[nn.Module, str, nn.Parameter]]
    ) -> Callable[..., Any]:
        """Returns `forward` with the parameters of `slots` cast while it runs; gradients reach them."""

        def computed(*args: Any, **kwargs: Any) -> Any:
            if (dtype := self.compute_dtype) is None:
                return forward(*args, **kwargs)
            made = {parameter: parameter.to(dtype) for parameter in {each for *_, each in slots}}
            for module, name, parameter in slots:
                module._parameters[name] = made[parameter]  # type: ignore[assignment]
            try:
                return forward(*args, **kwargs)
            finally:
                for module, name, parameter in slots:
                    module._parameters[name] = parameter

        return computed

    def compile_layers(self, backend: Any = "inductor") -> None:
        """Makes each layer compute by compiled graphs, which hold for micro batches of any size.

        All layers of one kind share them. Attention and experts stay as they are: a plan is an object of
        Python, and how many tokens an expert gets depends on the data. Dropout draws other numbers.
        """
        self.hf.set_attn_implementation(register_uncompiled())
        for layer in self.layers:
            for part in layer.children():
                if any(type(each).__name__.endswith(_ROUTED) for each in part.modules()):
                    part.forward = torch.compiler.disable(part.forward)
            layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)

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

    def replay_experts(self, *, weights: bool = False) -> None:
        """Makes every forward send tokens to the experts that it is given, not to those of the routers; with
        `weights`, weighed as it is told, not by the routers."""
        self.replay = ExpertReplay(self.hf, weights=weights)

    def balance_experts(self) -> None:
        """Makes the forwards of a step give their shares of the balancing loss of its experts."""
        self.balance = ExpertBalance(self.hf)

    def embed(self, token_ids: Tensor, images: ImageInputs | None) -> Tensor | None:
        """Embeds a row of tokens with images; None without images: the model embeds ids itself."""
        if images is None:
            return None
        assert self.images is not None
        return embed(self.hf, self.images, token_ids, images)

    def hidden(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, embeddings: Tensor | None = None
    ) -> Tensor:
        """Computes the last hidden states; ids and positions are [batch, tokens].

        `embeddings` are those of one row of tokens, in the place of those of the ids.
        """
        if self.way == "rows":
            return self._hidden_in_rows(token_ids[0], self.rows_of(plan), embeddings)[None]
        inputs = {"input_ids": token_ids} if embeddings is None else {"inputs_embeds": embeddings[None]}
        output = self.base(**inputs, position_ids=positions, use_cache=False, plan=plan, windows=self.windows)
        states: Tensor = output.last_hidden_state
        return states

    def rows_of(self, plan: AttentionPlan) -> PaddedRows:
        """Returns the rows of a plan's sequences; raises ModelError if it has none."""
        if not isinstance(plan, SharedAttention):
            raise ModelError(
                f"{type(self.hf).__name__} cannot compute by {type(plan).__name__}: its sequences go in rows "
                f"({self.why_rows})"
            )
        return plan.rows(self.device)

    def _hidden_in_rows(self, token_ids: Tensor, rows: PaddedRows, embeddings: Tensor | None) -> Tensor:
        """Computes hidden states by HF's own attention, which needs no mask where padding comes last."""
        given = token_ids if embeddings is None else embeddings
        inputs = {"input_ids" if embeddings is None else "inputs_embeds": rows.spread(given)}
        states = self.base(**inputs, **without_cache(self.base))[0]
        return rows.gather(states)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.hf.get_output_embeddings()(hidden)
        if self.logit_factor != 1.0:
            logits = logits * self.logit_factor
        return capped(logits, self.logit_softcap)

    def predict(self, hidden: Tensor, token_ids: Tensor, temperatures: Tensor, layout: Layout) -> TokenOutput:
        """Predicts the tokens of `layout.predicted` from the hidden states of `layout.computed`."""
        head, predicted = self.hf.get_output_embeddings(), layout.predicted
        output: TokenOutput = head(
            hidden[layout.predecessors], token_ids[predicted], temperatures[predicted], layout.read
        )
        return output

    def _read_head(
        self, logits: Callable[[Tensor], Tensor], hidden: Tensor, *targets: Tensor
    ) -> Tensor | TokenOutput:
        """Computes logits, as the head does by itself; or, given token ids, temperatures and rows that are
        read, what the hidden states predict.

        It is the head's own forward: FSDP gathers the weights of a module while that runs, and no longer.
        """
        return self.predict_rows(hidden, *targets) if targets else logits(hidden)

    def predict_rows(
        self, hidden: Tensor, token_ids: Tensor, temperatures: Tensor, read: Tensor
    ) -> TokenOutput:
        """Predicts a token from each hidden state, by the weights of the head."""
        head, factor, cap = self.hf.get_output_embeddings(), self.logit_factor, self.logit_softcap
        if factor != 1.0:  # factor · logit ÷ temperature, and the cap likewise
            temperatures, cap = temperatures / factor, None if cap is None else cap / factor
        return predict(
            hidden,
            self.head_weight(),
            getattr(head, "bias", None),
            token_ids,
            temperatures,
            read,
            max_logits=self.max_logits,
            softcap=cap,
        )

    def head_weight(self) -> Tensor:
        """Returns the weight of the head, with what its active adapter adds."""
        head = self.hf.get_output_embeddings()
        weight: Tensor = head.weight
        if not hasattr(head, "lora_A"):
            return weight
        (slot,) = head.active_adapters
        added: Tensor = head.lora_B[slot].weight @ head.lora_A[slot].weight
        return weight + float(head.scaling[slot]) * added

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        temperatures: Tensor,
        layout: Layout,
        routed_experts: Tensor | None = None,
        expert_weights: Tensor | None = None,
        trainable: Tensor | None = None,
        images: ImageInputs | None = None,
    ) -> TokenOutput:
        """Computes logprob and entropy of every token of packed sequences; arguments are one row of tokens.

        A token is predicted by the hidden state of the token before it, at its own temperature. `trainable`
        tells the tokens that the balancing loss counts, if there is one.
        """
        arguments = token_ids, positions, temperatures, layout, routed_experts, expert_weights, images
        if self.balance is None or not self.balance.is_begun or trainable is None:
            return self._predict_all(*arguments)
        self.balance.repeat_draws(self.device)
        with self.balance.reading() as logits:
            output = self._predict_all(*arguments)
        share = self.balance.share(self._by_token(logits, layout), predicting(layout, trainable))
        return output._replace(balance=share if layout.own is None else layout.own.total(share))

    def _predict_all(
        self,
        token_ids: Tensor,
        positions: Tensor,
        temperatures: Tensor,
        layout: Layout,
        routed_experts: Tensor | None,
        expert_weights: Tensor | None,
        images: ImageInputs | None,
    ) -> TokenOutput:
        ids, places = token_ids[layout.computed][None], positions[layout.computed][None]
        embeddings = self.embed(token_ids, images)
        embeddings = None if embeddings is None else embeddings[layout.computed]
        replaced = None
        if self.replay is None or routed_experts is None:
            hidden = self.hidden(ids, places, layout.plan, embeddings).squeeze(0)
        else:
            recorded = routed_experts[layout.computed]
            weights = None if expert_weights is None else expert_weights[layout.computed]
            rows = self.rows_of(layout.plan) if self.way == "rows" else None
            if rows is not None:
                recorded = rows.spread_flat(recorded.short(), fill=-1)  # bytes have no number below 0
                weights = None if weights is None else rows.spread_flat(weights, fill=math.nan)
            with self.replay.of(recorded, weights) as replayed:
                hidden = self.hidden(ids, places, layout.plan, embeddings).squeeze(0)
            of_computed = replayed.share_replaced()
            of_computed = of_computed if rows is None else rows.gather(of_computed)
            replaced = of_computed[layout.predecessors]
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

    def _by_token(self, logits: dict[int, Tensor], layout: Layout) -> dict[int, Tensor]:
        """Takes the rows of computed tokens out of what routers gave for rows with padding."""
        if self.way != "rows":
            return logits
        rows = self.rows_of(layout.plan)
        return {number: rows.gather(each) for number, each in logits.items()}

    @torch.no_grad()
    def count_experts(
        self,
        token_ids: Tensor,
        positions: Tensor,
        temperatures: Tensor,
        layout: Layout,
        routed_experts: Tensor | None,
        expert_weights: Tensor | None,
        trainable: Tensor,
    ) -> Tensor:
        """Counts how often each expert is chosen for tokens that predict a trainable one: by the record if it
        is replayed, else by a forward."""
        assert self.balance is not None
        weights = predicting(layout, trainable)
        if self.replay is not None and routed_experts is not None:
            recorded = routed_experts[layout.computed]
            return count_experts(recorded, weights, self.replay.shape.num_experts)
        with self.balance.counting(self.device) as logits:
            self(token_ids, positions, temperatures, layout, routed_experts, expert_weights)
        return self.balance.count(self._by_token(logits, layout), weights)
