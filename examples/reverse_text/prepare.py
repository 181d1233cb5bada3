"""Makes what the example starts from: an untrained character-level model and data to warm it up.

    python examples/reverse_text/prepare.py outputs/reverse_text

writes `model/` (0.9 M parameters, its tokenizer) and `warmup.jsonl` (chats that reverse a word).
"""

import argparse
import json
import random
import string
from pathlib import Path

from pellucid.model.tiny import make_tiny_model

NUM_EXAMPLES = 4096
MIN_LETTERS, MAX_LETTERS = 4, 8
MAX_TOKENS = 8192
"""Longest sequence that the model may be given; as many are packed into one micro batch."""


def write_warmup(path: Path, seed: int) -> None:
    generator = random.Random(seed)
    with path.open("w") as file:
        for _ in range(NUM_EXAMPLES):
            length = generator.randint(MIN_LETTERS, MAX_LETTERS)
            word = "".join(generator.choices(string.ascii_lowercase, k=length))
            messages = [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model and the data that the example starts from.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs/reverse_text"))
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and words")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(options.folder / "model", seed=options.seed, max_length=MAX_TOKENS)
    write_warmup(options.folder / "warmup.jsonl", seed=options.seed)
    print(f"wrote {options.folder / 'model'} and {options.folder / 'warmup.jsonl'}")


if __name__ == "__main__":
    main()
