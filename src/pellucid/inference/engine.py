"""The embedded engine: continuous batching over slots, synchronous and single-threaded.

    step    admit what fits -> arrange the cache -> one forward of new prompts and running sequences -> draw
            score what was asked for, as far as prompts have left room

Invariants, besides those of `slots.py`:
- Equal prompts are computed once, as long as one of their requests still runs under the same weights.
- The host waits for a GPU once per step, for the tokens and what belongs to them, and once if it scores.
- Prompts and scorings of a step are bounded by `MAX_PREFILL_TOKENS`, so neither holds up running sequences
  for long. Each step scores at least one sequence, however many prompts there are.
- A weight swap happens between two steps. Running sequences keep their cache and go on under the new
  weights.
- Where experts are recorded, a token's are those of the forward that computed its keys and values; requests
  that share a prompt have the same ones for it."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pellucid.data import PackedArray
from pellucid.data.tensors import read_together, to_device
from pellucid.errors import InferenceError
from pellucid.inference.cohorts import CohortDecoder
from pellucid.inference.decoder import Decoder, Prompt, SequenceRow
from pellucid.inference.kv_cache import PackedDecoder
from pellucid.inference.slots import Request, Scoring, SlottedEngine
from pellucid.model import ExpertRecorder, Policy, token_logprobs
from pellucid.model.masks import NotPacked
from pellucid.model.proof import prove_rows
from pellucid.transport.weights import ServedWeights

MAX_PREFILL_TOKENS = 8192

_Prompt = tuple[bytes, bytes]
"""See `Request.prompt`."""


class Engine(SlottedEngine[SequenceRow]):
    def __init__(
        self,
        policy: Policy,
        *,
        num_slots: int,
        max_length: int,
        max_queued: int = 4096,
        decode_text: Callable[[list[int]], str] | None = None,
        record_experts: bool = False,
        record_expert_weights: bool = False,
    ) -> None:
        """`record_expert_weights`: the weights of experts, too. The policy is the engine's from now on."""
        super().__init__(
            num_slots=num_slots,
            max_length=max_length,
            max_queued=max_queued,
            vocab_size=policy.vocab_size,
            decode_text=decode_text,
        )
        policy.speed_up()
        self._policy = policy
        self._weights = ServedWeights(policy.hf)
        records = record_experts or record_expert_weights
        self._recorder = ExpertRecorder(policy.hf, weights=record_expert_weights) if records else None
        self._decoder = self._make_decoder(max_length)
        self._latest_prompt: tuple[Sequence[int], bytes] = ([], b"")
        """The prompt admitted last, as it came and as bytes."""

    def _make_decoder(self, max_length: int) -> Decoder[Any]:
        if self._policy.way == "packed":
            try:
                return PackedDecoder(self._policy, self.num_slots, max_length, self._recorder)
            except NotPacked as reason:
                prove_rows(self._policy, max_length, str(reason))
        return CohortDecoder(self._policy, max_length, self._recorder)

    def _reason_against_images(self, token_ids: Sequence[int], mm_tensors: bytes) -> str:
        shape = self._policy.images
        num_places = 0 if shape is None else token_ids.count(shape.token_id)
        if not (mm_tensors or num_places):
            return ""
        if shape is None or self._decoder.why_no_images:
            return f"the prompt has images, and {self._decoder.why_no_images}; leave them out"
        if not mm_tensors:
            return f"{num_places} tokens of the prompt stand for images that are missing; send mm_tensors"
        if token_ids[-1] == shape.token_id:
            return "the prompt ends with an image; let a token of text follow"
        reason = shape.why_not(num_places, mm_tensors)
        return f"mm_tensors {reason}" if reason else ""

    def check_scoring(self, token_ids: Sequence[int], temperature: float) -> None:
        super().check_scoring(token_ids, temperature)
        if self._policy.images is not None and self._policy.images.token_id in token_ids:
            raise InferenceError("the sequence has tokens that stand for images; only text can be scored")

    def update_weights(self, version: int, folder: Path) -> None:
        self._weights.load(folder)
        self.version = version
        self.num_loads += 1
        self._decoder.forget_prefixes()

    def served_digests(self) -> dict[str, str]:
        return self._weights.digests()

    @torch.inference_mode()
    def step(self) -> None:
        num_prefilled = self.counts.prefill_tokens
        self._sample()
        self._score(MAX_PREFILL_TOKENS - (self.counts.prefill_tokens - num_prefilled))

    def _sample(self) -> None:
        donors = self._donors()
        admitted = self._admit(donors)
        prompts = self._share(admitted, donors)
        rows = self._decoder.arrange()
        if not rows:
            return
        requests = [self._running[row] for row in rows]
        drawn = draw(
            self._decoder.logits(prompts, rows, [request.last_token for request in requests]),
            [request.params.temperature for request in requests],
            [request.generator.random() for request in requests],
        )
        recorded = [] if self._recorder is None else [self._decoder.experts()]
        tokens, logprobs, *experts = read_together([*drawn, *recorded])
        for each in experts:
            self._keep_experts(each, prompts, rows)
        for row in rows:
            row.length += 1
        self._take(requests, tokens.tolist(), logprobs.tolist())

    def _score(self, budget: int) -> None:
        """Scores sequences in order of arrival: at least one, and more while they fit into the budget."""
        due: list[Scoring] = []
        for scoring in self._scorings:
            budget -= len(scoring.token_ids)
            if due and budget < 0:
                break
            due.append(scoring)
        if due:
            for scoring, logprobs in zip(due, self._decoder.score(due), strict=True):
                del self._scorings[scoring]
                self.counts.scored_tokens += len(logprobs)
                scoring.finish(logprobs, self.version)

    def _admit(self, donors: Mapping[_Prompt, SequenceRow]) -> dict[_Prompt, list[SequenceRow]]:
        """Gives free slots to waiting requests; returns their rows, by prompt."""
        admitted: dict[_Prompt, list[SequenceRow]] = {}
        budget = MAX_PREFILL_TOKENS
        while self._waiting and len(self._running) < self.num_slots and budget > 0:
            request = next(iter(self._waiting))
            request.prompt = self._as_bytes(request.prompt_ids), request.mm_tensors
            if request.prompt not in admitted and not self._fits(request):
                break
            row = self._decoder.add(len(request.prompt_ids))
            self._start(request, row)
            if request.prompt not in admitted and request.prompt not in donors:
                budget -= row.length
            admitted.setdefault(request.prompt, []).append(row)
        return admitted

    def _fits(self, first: Request) -> bool:
        """Returns whether a request, the first that waits, can start with those behind it that share its
        prompt, as many as there are slots for."""
        if not self._decoder.starts_together:
            return True
        mates = takewhile(lambda each: each.prompt_ids == first.prompt_ids, self._waiting)
        num_mates = sum(1 for _ in islice(mates, self.num_slots))
        return num_mates <= self.num_slots - len(self._running)

    def _as_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Returns the ids as int64 bytes; the members of a group share one list, which is converted once."""
        if prompt_ids is not self._latest_prompt[0]:
            self._latest_prompt = (prompt_ids, np.asarray(prompt_ids, np.int64).tobytes())
        return self._latest_prompt[1]

    def _donors(self) -> dict[_Prompt, SequenceRow]:
        """Returns rows whose prompt was computed under the current weights, by prompt."""
        if not self._waiting:
            return {}
        return {
            request.prompt: row
            for row, request in self._running.items()
            if request.started_after == self.num_loads
        }

    def _share(
        self, admitted: Mapping[_Prompt, list[SequenceRow]], donors: Mapping[_Prompt, SequenceRow]
    ) -> list[Prompt[SequenceRow]]:
        """Copies the prompts that are in the cache already; returns the others, to be computed once each.

        The last token of a prompt is always computed by its request: it predicts the first token sampled.
        """
        fresh = []
        for prompt, rows in admitted.items():
            token_ids = np.frombuffer(prompt[0], np.int64)[:-1]
            donor = donors.get(prompt)
            if donor is None:
                fresh.append(Prompt(token_ids, rows, prompt[1]))
                self.counts.prefill_tokens += len(token_ids)
            else:
                for row in rows:
                    self._decoder.copy_prefix(donor, row, len(token_ids))
                    self._copy_experts(donor, row, len(token_ids))
            self.counts.shared_tokens += len(token_ids) * (len(rows) - (donor is None))
        return [prompt for prompt in fresh if len(prompt.token_ids)]

    def _keep_experts(
        self, experts: NDArray[Any], prompts: Sequence[Prompt[SequenceRow]], rows: Sequence[SequenceRow]
    ) -> None:
        """Stores the routed experts of a step's tokens with their requests.

        `experts` holds the tokens of all prompts, then one token per row; every request that starts with a
        prompt gets that prompt's experts.
        """
        first = 0
        for prompt in prompts:
            last = first + len(prompt.token_ids)
            for row in prompt.rows:
                self._running[row].experts += experts[first:last].tobytes()
            first = last
        for row, own in zip(rows, experts[first:], strict=True):
            self._running[row].experts += own.tobytes()

    def _copy_experts(self, source: SequenceRow, target: SequenceRow, num_tokens: int) -> None:
        if self._recorder is not None:
            num_bytes = num_tokens * self._recorder.shape.num_bytes
            self._running[target].experts += self._running[source].experts[:num_bytes]

    def _experts_of(self, request: Request) -> tuple[PackedArray | None, PackedArray | None]:
        return (None, None) if self._recorder is None else self._recorder.shape.pack(request.experts)

    def _free(self, slot: SequenceRow) -> None:
        self._decoder.remove(slot)


_BLOCK = 256


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[Tensor, ...]:
    """Draws a token per row, with its logprob; temperature 0: the likeliest, logprob at temperature 1."""
    given = np.array(temperatures, np.float32)
    scales, levels, greedy = to_device(
        [np.where(given == 0, np.float32(1), given), np.array(uniforms), given == 0], logits.device
    )
    logprobs = token_logprobs(logits, scales)
    tokens = _inverse_cdf(logprobs, levels)
    if 0 in temperatures:
        tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _inverse_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Finds first the block of the vocabulary, then the token in it.

    Sums run in float64 where it matters: adding up a large vocabulary in float32 would starve the rare tokens
    at its end. With blocks, which add up a few hundred numbers each, only a small part has to be converted.
    """
    num_rows, vocab_size = logprobs.shape
    if vocab_size <= _BLOCK:
        masses = logprobs.double().exp()
        return _locate(masses, uniforms * masses.sum(-1))[0]
    num_blocks = -(-vocab_size // _BLOCK)
    padded = logprobs.new_zeros(num_rows, num_blocks * _BLOCK)
    torch.exp(logprobs, out=padded[:, :vocab_size])
    blocks = padded.view(num_rows, num_blocks, _BLOCK)
    masses = blocks.sum(-1).double()
    block, rest = _locate(masses, uniforms * masses.sum(-1))
    token, _ = _locate(blocks[torch.arange(num_rows, device=logprobs.device), block].double(), rest)
    return block * _BLOCK + token


def _locate(masses: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the entry of each row in which its target falls, and how far into it: [2, 0, 3], 2.5 -> 2, 0.5.

    Never an entry without mass, whatever rounding did to the target.
    """
    ends = masses.cumsum(-1)
    total = ends[:, -1]
    inside = targets.minimum(torch.nextafter(total, torch.zeros_like(total)))[:, None]
    index = torch.searchsorted(ends, inside, right=True).clamp_(max=masses.shape[1] - 1)
    starts = ends.gather(-1, index) - masses.gather(-1, index)
    return index[:, 0], (inside - starts).clamp_(min=0)[:, 0]
