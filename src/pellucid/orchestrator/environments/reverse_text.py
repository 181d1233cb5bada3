"""`reverse-text`: the answer to a word is the word backwards.

user: "stream"   "maerts" -> reward 1.0, exact 1     "maert" -> reward 0.909, exact 0
"""

import string
from difflib import SequenceMatcher

from pellucid.data import Example
from pellucid.orchestrator.environment import Score, SingleTurnEnvironment


class ReverseText(SingleTurnEnvironment):
    def __init__(self, *, seed: int, min_letters: int = 4, max_letters: int = 8) -> None:
        super().__init__(seed=seed)
        if not 1 <= min_letters <= max_letters:
            raise ValueError(
                f"min_letters = {min_letters} has to be at least 1 and at most max_letters = {max_letters}"
            )
        self._min_letters = min_letters
        self._max_letters = max_letters

    def example(self, index: int) -> Example:
        generator = self.generator(index)
        num_letters = generator.randint(self._min_letters, self._max_letters)
        word = "".join(generator.choices(string.ascii_lowercase, k=num_letters))
        return Example(str(index), [{"role": "user", "content": word}], {"answer": word[::-1]})

    def reward(self, example: Example, text: str) -> Score:
        answer = example.info["answer"]
        similarity = SequenceMatcher(None, text, answer).ratio()
        return Score(similarity, {"exact": float(text == answer)})
