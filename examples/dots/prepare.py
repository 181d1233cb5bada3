"""Makes what the example starts from: an untrained model that reads images, and data to warm it up.

    python examples/dots/prepare.py outputs/dots

writes `model/` (a SmolVLM of 0.2 M parameters) and `warmup.jsonl`: chats without a picture that answer with
any number, so that the warmed-up model knows the form of an answer and nothing about dots.
"""

import argparse
import json
import random
from pathlib import Path

from count_dots import MAX_DOTS, QUESTION, SIDE
from pellucid.model.tiny import make_tiny_vision_model

NUM_EXAMPLES = 512


def prepare(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_vision_model(folder / "model", image_size=SIDE, patch_size=4, scale_factor=2, seed=seed)
    generator = random.Random(seed)
    with (folder / "warmup.jsonl").open("w") as file:
        for _ in range(NUM_EXAMPLES):
            answer = str(generator.randint(1, MAX_DOTS))
            messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model and the data that the example starts from.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs/dots"))
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and answers")
    options = parser.parse_args()
    prepare(options.folder, options.seed)
    print(f"wrote {options.folder / 'model'} and {options.folder / 'warmup.jsonl'}")


if __name__ == "__main__":
    main()
