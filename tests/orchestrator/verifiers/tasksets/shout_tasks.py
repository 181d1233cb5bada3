"""The answer to a word is the word in capitals."""

import asyncio

import verifiers.v1 as vf


class ShoutConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("hi", "ho", "hey")
    endless: bool = False


class ShoutState(vf.State):
    heard: str = ""


class ShoutData(vf.TaskData):
    answer: str


class ShoutTask(vf.Task[ShoutData, ShoutState]):
    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.state.heard = trace.last_reply
        trace.info["seen_tokens"] = [(b.token_ids, b.sampled_mask, b.logprobs) for b in trace.branches]

    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        if trace.last_reply == "crash":
            raise ZeroDivisionError("no score for this")
        if trace.last_reply == "slow":
            await asyncio.sleep(60)
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def long_enough(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) >= 3)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ShoutTaskset(vf.Taskset[ShoutTask, ShoutConfig]):
    def load(self):
        number = 0
        while number < len(self.config.words) or self.config.endless:
            word = self.config.words[number % len(self.config.words)]
            yield ShoutTask(ShoutData(prompt=word, system_prompt="Shout.", answer=word.upper()))
            number += 1

    @property
    def bounded(self) -> bool:
        return not self.config.endless


__all__ = ["ShoutTaskset"]
