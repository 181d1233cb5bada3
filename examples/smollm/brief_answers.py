"""Answer in one brief sentence: a reward that can be checked, for a model that likes to talk.

0.4   the reply ends by itself
0.3   it is one sentence: a single full stop, at its end
0.3   it has three to eight words
"""

from pellucid.data import Example
from pellucid.orchestrator import Environment, Score, Session

TOPICS = (
    "a bicycle", "a volcano", "the moon", "a library", "bread", "a river", "music", "a computer", "winter",
    "a dog", "the sea", "a garden", "coffee", "a train", "a mountain", "rain", "a book", "a bridge", "salt",
    "a clock", "the sun", "a forest", "tea", "a lamp", "a market", "snow", "a boat", "a school", "honey",
)  # fmt: skip
QUESTIONS = (
    "What is {}?",
    "Tell me something about {}.",
    "Why do people like {}?",
    "Describe {}.",
    "What would you use {} for?",
)
MIN_WORDS, MAX_WORDS = 3, 8


class BriefAnswers(Environment):
    def example(self, index: int) -> Example:
        generator = self.generator(index)
        question = generator.choice(QUESTIONS).format(generator.choice(TOPICS))
        content = f"{question} Answer in one sentence of at most {MAX_WORDS} words."
        return Example(str(index), [{"role": "user", "content": content}])

    async def rollout(self, example: Example, session: Session) -> Score:
        turn = await session.sample(example.messages)
        return score(turn.text, ended=turn.finish_reason == "stop")


def score(text: str, *, ended: bool) -> Score:
    """`score("Bread is baked dough.", ended=True)` is 1."""
    text = text.strip()
    is_sentence = text.endswith(".") and text.count(".") == 1
    is_brief = MIN_WORDS <= len(text.split()) <= MAX_WORDS
    reward = 0.4 * ended + 0.3 * is_sentence + 0.3 * is_brief
    return Score(reward, {"ended": ended, "sentence": is_sentence, "brief": is_brief})
