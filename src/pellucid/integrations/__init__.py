"""Token exports of other trainers: any PyTorch loop, and TRL's GRPO trainer (`pellucid.integrations.trl`).

    recorder = TokenRecorder("outputs/mine", loss={"type": "ppo_clip", "clip_high": 0.28}, model="my/model")
    for batch in batches:
        …                                            forward, loss, backward, optimizer: as they are
        recorder.add(
            token_ids=ids,                           [B, T], padded on either side, or both
            attention_mask=attention_mask,           [B, T]
            loss_mask=completion_mask,               [B, T] or of the last columns only
            inference_logprobs=old_logprobs,
            trainer_logprobs=logprobs,
            advantages=advantages,                   [B]
            rewards=rewards,                         [B]
        )
        recorder.finish_step(loss=loss.item())
    recorder.close()

What comes out is what pellucid's own trainer writes: `pellucid view`, `pellucid replay` and
`pellucid.export.open` read it.
"""

from pellucid.config.tools import RecordedConfig
from pellucid.integrations.recorder import TokenRecorder

__all__ = ["RecordedConfig", "TokenRecorder"]
