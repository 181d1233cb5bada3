"""Makes what the example starts from: a model that has begun to see.

    python examples/dots/prepare.py outputs/dots

writes `model/`: a SmolVLM of 0.3 M parameters, trained on labelled pictures (a plain loop of PyTorch, a few
seconds) until it gives half of the right answers, at temperature 1. RL on rewards does the rest.
"""

import argparse
from pathlib import Path

import torch
from count_dots import SIDE, CountDots
from transformers import AutoModelForImageTextToText

from pellucid.data.images import ImagePrompt
from pellucid.data.tokenizer import load_tokenizer
from pellucid.model import ImageInputs
from pellucid.model.tiny import make_tiny_vision_model
from pellucid.orchestrator.chat import ChatTemplate

NUM_PICTURES = 64
GOAL = 0.5


def prepare(folder: Path, seed: int) -> float:
    """Returns the probability of right answers that the model ends with."""
    path = folder / "model"
    make_tiny_vision_model(path, image_size=SIDE, patch_size=4, scale_factor=2, seed=seed)
    tokenizer = load_tokenizer(str(path))
    chat = ChatTemplate(tokenizer)
    model = AutoModelForImageTextToText.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    environment, share, step = CountDots(seed=seed + 1), 0.0, 0
    while share < GOAL and step < 200:
        prompts, answers = [], []
        for index in range(step * NUM_PICTURES, (step + 1) * NUM_PICTURES):
            example = environment.example(index)
            prompt = chat.prompt(example.messages).token_ids
            assert isinstance(prompt, ImagePrompt)
            prompts.append(prompt)
            answers.append([*tokenizer.encode(example.info["answer"]), tokenizer.eos_token_id])
        images = ImageInputs.of([([], prompt.mm_tensors) for prompt in prompts], torch.device("cpu"))
        ids = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
        logits = model(input_ids=ids, pixel_values=torch.stack(list(images.pixel_values))).logits
        targets = ids[:, -2:, None]
        answer_logprobs = logits[:, -3:-1].log_softmax(-1).gather(-1, targets)[..., 0]
        share = float(answer_logprobs.detach().sum(-1).exp().mean())
        optimizer.zero_grad()
        (-answer_logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    model.save_pretrained(path)
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model that the example starts from.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs/dots"))
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and pictures")
    options = parser.parse_args()
    share = prepare(options.folder, options.seed)
    print(f"wrote {options.folder / 'model'}, which gives {share:.0%} of the right answers")


if __name__ == "__main__":
    main()
