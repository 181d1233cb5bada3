"""Tasks of the `reasoning-gym` library as environments: it makes the questions and judges the answers.

    args = { task = "chain_sum", max_terms = 3 }         the task's own settings
    args = { task = "chain_sum", level = 2 }             as hard as level 2 of the task's curriculum
    args = { task = "chain_sum", raise_every = 200 }     level 0 for 200 examples, then level 1, …

- A question is a function of seed and index alone, the level included, so a resumed run goes on with the same
  questions. A curriculum that follows the reward could not.
- Training and evaluation never share a question, also where a task has few: every question belongs to one of
  the two by its text, one of eight to evaluations.
- The same answer always has the same reward; the library's own verifier computes it, beside the event loop.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal

from pellucid.data import Example
from pellucid.orchestrator.environment import Score, SingleTurnEnvironment
from pellucid.orchestrator.session import stable_seed

_HELD_OUT_OF = 8
"""One of so many questions belongs to evaluations."""

_EXAMPLES_PER_SEED = 5
"""Examples that come from one data set of the library: making one takes up to a second."""

_CANDIDATES = 100
"""Questions that are looked at for an example of the right kind; all miss it in one of 600,000 cases."""

_MAX_SEED = 2**32


class ReasoningGym(SingleTurnEnvironment):
    heavy_reward = True  # some verifiers parse and simplify formulas, which takes up to seconds

    def __init__(
        self,
        *,
        seed: int,
        held_out: bool = False,
        task: str,
        level: int | None = None,
        raise_every: int | None = None,
        max_level: int | None = None,
        answer: Literal["tag", "reply"] = "tag",
        instruction: str | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are the task's own. `level` is one of its curriculum, for all of its attributes, and
        rises by one after every `raise_every` examples, up to `max_level`.

        `answer`: the model answers in `<answer>…</answer>` and may think before, or its whole reply is the
        answer. `instruction` is the system message; by default it asks for the tags, if there are any.
        """
        super().__init__(seed=seed)
        self._task = _known_task(task)
        self._settings = settings
        self._is_held_out = held_out
        self._level, self._raise_every, self._max_level = _checked_levels(task, level, raise_every, max_level)
        if answer not in ("tag", "reply"):
            raise ValueError(f"answer = {answer!r} has to be 'tag' or 'reply'")
        self._has_tag = answer == "tag"
        if instruction is None:
            instruction = _library().utils.SYSTEM_PROMPTS["default"] if self._has_tag else ""
        self._opening = [{"role": "system", "content": instruction}] if instruction else []
        self._recall()
        self.example(0)  # shows whether settings and level are right

    def _recall(self) -> None:
        """Starts to remember: a question is made for its example, and again for each of its rewards."""
        self._dataset = lru_cache(maxsize=64)(self._make_dataset)
        self._entry = lru_cache(maxsize=4096)(self._find_entry)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_dataset": None, "_entry": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._recall()

    def example(self, index: int) -> Example:
        entry = self._entry(index)
        messages = [*self._opening, {"role": "user", "content": entry["question"]}]
        return Example(str(index), messages, {"answer": entry["answer"], "level": self.level_at(index)})

    def reward(self, example: Example, text: str) -> Score:
        index = int(example.example_id)
        level = self.level_at(index)
        answer = _library().utils.extract_answer(text) if self._has_tag else text.strip()
        dataset = self._dataset(index // _EXAMPLES_PER_SEED, level)
        score = 0.0 if answer is None else float(dataset.score_answer(answer, self._entry(index)))
        metrics = {"correct": float(score >= 1.0), "answered": float(answer is not None)}
        if level is not None:
            metrics["level"] = float(level)
        return Score(score, metrics, {"answer": answer})

    def level_at(self, index: int) -> int | None:
        """Returns the level of the example at `index`; None: the task is as hard as its settings say."""
        if self._level is None or self._raise_every is None:
            return self._level
        return min(self._level + index // self._raise_every, self._max_level)

    def _find_entry(self, index: int) -> Mapping[str, Any]:
        number, place = divmod(index, _EXAMPLES_PER_SEED)
        dataset = self._dataset(number, self.level_at(index))
        for candidate in range(place * _CANDIDATES, (place + 1) * _CANDIDATES):
            entry: Mapping[str, Any] = dataset[candidate]
            if _is_held_out(entry["question"]) == self._is_held_out:
                return entry
        kind = "evaluations" if self._is_held_out else "training"
        raise ValueError(
            f"task = {self._task!r} has too few different questions with these settings: of {_CANDIDATES}, "
            f"none belongs to {kind}; make it harder"
        )

    def _make_dataset(self, number: int, level: int | None) -> Any:
        dataset_class, config_class = _library().factory.DATASETS[self._task]
        names = {field.name for field in fields(config_class)} - {"seed", "size"}
        if unknown := sorted(self._settings.keys() - names):
            raise ValueError(f"{unknown[0]!r} is no setting of {self._task!r}; {_nearest(unknown[0], names)}")
        config = config_class() if level is None else self._config_at(level)
        seed = stable_seed(self._seed, number) % _MAX_SEED
        size = _EXAMPLES_PER_SEED * _CANDIDATES
        try:
            config = replace(config, **self._settings, seed=seed, size=size)
            return dataset_class(config)
        except AssertionError as error:
            raise ValueError(f"{self._task!r} refuses its settings: {error}") from error

    def _config_at(self, level: int) -> Any:
        curriculum = _library().factory.create_curriculum(self._task)
        curriculum.set_global_level(level)
        return curriculum.generate_configuration()


def _is_held_out(question: str) -> bool:
    """Returns whether a question belongs to evaluations, which its text alone decides."""
    return blake2b(question.encode(), digest_size=8).digest()[0] % _HELD_OUT_OF == 0


def _library() -> Any:
    """Imports the library only now: it takes seconds."""
    import reasoning_gym

    return reasoning_gym


def _known_task(task: str) -> str:
    known = _library().factory.DATASETS.keys() - {"composite"}
    if task not in known:
        raise ValueError(
            f"task = {task!r} is not one of the {len(known)} tasks; {_nearest(str(task), known)}"
        )
    return task


def _checked_levels(
    task: str, level: int | None, raise_every: int | None, max_level: int | None
) -> tuple[int | None, int | None, int]:
    """Returns level, when it rises and the highest; ValueError if the curriculum lacks such levels."""
    if level is None and raise_every is None and max_level is None:
        return None, None, 0
    if raise_every is None and max_level is not None:
        raise ValueError(f"max_level = {max_level} needs raise_every, after which the level rises")
    if not _library().factory.has_curriculum(task):
        raise ValueError(f"task = {task!r} has no curriculum: leave out level and raise_every")
    attributes = _library().factory.create_curriculum(task).attributes.values()
    last = max((len(attribute.levels) for attribute in attributes), default=1) - 1
    level, max_level = level or 0, last if max_level is None else max_level
    if level < 0 or (raise_every is not None and raise_every < 1):
        raise ValueError(f"level = {level} has to be at least 0, raise_every = {raise_every} at least 1")
    if max(level, max_level) > last:
        raise ValueError(f"level {max(level, max_level)} is above the last one of {task!r}, {last}")
    if max_level < level:
        raise ValueError(f"max_level = {max_level} is below level = {level}")
    return level, raise_every, max_level


def _nearest(name: str, known: Any) -> str:
    return f"the nearest is {difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]!r}"
