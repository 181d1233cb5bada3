"""A taskset of verifiers: the answer to a word is the word backwards."""

import random
import string
from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf


class Word(vf.TaskData):
    answer: str


class ReverseWord(vf.Task[Word]):
    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        return SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class WordsConfig(vf.TasksetConfig):
    num_words: int = 10_000
    seed: int = 0


class ReverseWords(vf.Taskset[ReverseWord, WordsConfig]):
    def load(self) -> Iterator[ReverseWord]:
        generator = random.Random(self.config.seed)
        for _ in range(self.config.num_words):
            word = "".join(generator.choices(string.ascii_lowercase, k=generator.randint(4, 8)))
            yield ReverseWord(Word(prompt=word, answer=word[::-1]))


__all__ = ["ReverseWords"]
