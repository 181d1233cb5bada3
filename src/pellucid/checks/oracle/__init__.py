"""A second implementation of everything between a rollout and the updated weights, to hold the first one to.

    conversation.py   messages -> prompts; turns -> samples, advantages, batches, truncation
    schedule.py       lengths of rollouts -> what starts, and batches that count tokens
    losses.py         logprobs -> token losses, their derivatives, masks; weights and denominator of a step
    training.py       token ids -> logprobs -> gradient -> clipping -> AdamW -> new weights

It is written from the documentation (losses, denominator, advantages, staleness) and the papers behind it,
in float64, for clarity and not for speed: one sequence at a time, the derivative of every loss by hand,
Hugging Face's own forward for the model. It imports nothing of pellucid, which a test asserts: a fault in the
trainer is not in here as well, unless it was made twice.
"""
