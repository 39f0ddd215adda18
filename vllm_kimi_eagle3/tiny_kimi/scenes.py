# SPDX-License-Identifier: Apache-2.0
"""Pictures of coloured shapes, what is in them, and how the picture pair is asked about them.

A scene has four corners; in each is one shape or nothing. The same scene can be shown as a picture or told in words,
and the answer is the same text, so acceptance on pictures has something of its own kind to be compared with.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SIDE = 112
"""A picture's sides in pixels: eight patches of 14, which make 16 tokens."""

BACKGROUND = (236, 236, 228)
COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (235, 200, 30),
    "purple": (140, 50, 170),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = {"small": 9, "large": 19}
CORNERS = ("top left", "top right", "bottom left", "bottom right")
COUNTS = ("No shapes", "One shape", "Two shapes", "Three shapes", "Four shapes")
ORDERS = {"row by row": (0, 1, 2, 3), "column by column": (0, 2, 1, 3), "from the bottom up": (2, 3, 0, 1)}


@dataclass(frozen=True)
class Scene:
    """What is in the four corners, as (size, colour, shape) or None, and the seed of where exactly."""

    corners: tuple[tuple[str, str, str] | None, ...]
    seed: int

    @classmethod
    def random(cls, seed: int) -> Scene:
        """The scene of a number; the same on every machine."""
        source = random.Random(f"scene {seed}")
        corners = tuple(
            (source.choice(list(SIZES)), source.choice(list(COLOURS)), source.choice(SHAPES))
            if source.random() < 0.75
            else None
            for _ in CORNERS
        )
        return cls(corners, seed)

    def draw(self) -> Any:
        """The scene as a PIL image of ``SIDE`` by ``SIDE`` pixels."""
        from PIL import Image, ImageDraw

        source = random.Random(f"places {self.seed}")
        image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
        pencil = ImageDraw.Draw(image)
        for i, thing in enumerate(self.corners):
            half = SIDE // 4
            x = half + i % 2 * 2 * half + source.randint(-5, 5)
            y = half + i // 2 * 2 * half + source.randint(-5, 5)
            if thing is None:
                continue
            size, colour, shape = thing
            r, fill = SIZES[size], COLOURS[colour]
            if shape == "circle":
                pencil.ellipse((x - r, y - r, x + r, y + r), fill)
            elif shape == "square":
                pencil.rectangle((x - r, y - r, x + r, y + r), fill)
            elif shape == "triangle":
                pencil.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill)
            else:
                third = max(2, r // 3)
                pencil.rectangle((x - r, y - third, x + r, y + third), fill)
                pencil.rectangle((x - third, y - r, x + third, y + r), fill)
        return image

    def told(self) -> str:
        """The scene in words, for a prompt without a picture."""
        return "[" + "; ".join("nothing" if thing is None else " ".join(thing) for thing in self.corners) + "]"

    def answer(self, order: str) -> str:
        """What the pair was trained to say, corner by corner in one of ``ORDERS``."""
        parts = [f"{COUNTS[sum(thing is not None for thing in self.corners)]}."]
        for i in ORDERS[order]:
            thing = self.corners[i]
            parts.append(f"{CORNERS[i].capitalize()}, {'nothing' if thing is None else 'a ' + ' '.join(thing)}.")
        return " ".join(parts)


def question(order: str) -> str:
    """The question that ``Scene.answer`` answers."""
    return f"What do you see, {order}?"
