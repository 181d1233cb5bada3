"""The list form of a sample, one Python object per value: what the data plane is measured against."""

from typing import Any

from pellucid.data import TrainingSample


def as_lists(sample: TrainingSample) -> dict[str, Any]:
    """Prompt and completion apart; the completion was sampled."""
    arrays = {name: array.array() for name, array in sample.arrays.items()}
    num_prompt = sample.length - sample.num_sampled
    return {
        "prompt_ids": arrays["token_ids"][:num_prompt].tolist(),
        "prompt_mask": arrays["loss_mask"][:num_prompt].tolist(),
        "completion_ids": arrays["token_ids"][num_prompt:].tolist(),
        "completion_mask": arrays["loss_mask"][num_prompt:].tolist(),
        "completion_logprobs": arrays["inference_logprobs"].tolist(),
        "temperature": 1.0,
        "training_mode": "rl",
        **{name: sample.values[name] for name in ("env_name", "group_id", "reward", "advantage")},
    }
