"""Count the dots in a picture: the smallest task that cannot be done without seeing.

user   [picture of 16 × 16 pixels with 1 to 4 white dots] "dots?"     "3" -> reward 1.0, else 0.0
"""

import io

from PIL import Image

from pellucid.data import Example
from pellucid.data.images import data_url
from pellucid.orchestrator import Score, SingleTurnEnvironment

SIDE = 16
MAX_DOTS = 4
ANSWERS = {str(number) for number in range(1, MAX_DOTS + 1)}
QUESTION = "dots?"


class CountDots(SingleTurnEnvironment):
    def example(self, index: int) -> Example:
        generator = self.generator(index)
        num_dots = generator.randint(1, MAX_DOTS)
        places = generator.sample([(x, y) for x in range(0, SIDE, 4) for y in range(0, SIDE, 4)], num_dots)
        picture = Image.new("RGB", (SIDE, SIDE))
        for x, y in places:
            picture.paste((255, 255, 255), (x + 1, y + 1, x + 3, y + 3))
        png = io.BytesIO()
        picture.save(png, "PNG")
        content = [data_url(png.getvalue()), {"type": "text", "text": QUESTION}]
        return Example(str(index), [{"role": "user", "content": content}], {"answer": str(num_dots)})

    def reward(self, example: Example, text: str) -> Score:
        return Score(float(text == example.info["answer"]), {"is_number": float(text in ANSWERS)})
