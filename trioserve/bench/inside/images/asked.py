"""Which pictures the benchmark asks for, and that each is the same whoever is computed with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trioserve.contracts.image_generation import ImageParams, Picture
from trioserve.engine.images.image_engine import ImageEngine

__all__ = ["AskedPictures"]

CLASSES_MAX = 10
LEVELS_APART_MAX = 2  # of 255: a batch is added up in another order, and a value at the edge is rounded the other way


class AskedPictures:
    """A picture is known by its seed, which also says what it is of. steps, guidance: of each, as a rule."""

    def __init__(self, engine: ImageEngine, *, steps: int, guidance: float) -> None:
        self._engine = engine
        self.steps, self.guidance = steps, guidance
        self.steps_max = engine.limits.steps_max
        self._made: dict[int, Picture] = {}

    def prompt(self, seed: int) -> str:
        classes = self._engine.model.classes
        return f"picture {seed}" if classes is None else classes[seed % min(CLASSES_MAX, len(classes))]

    def prompts(self, count: int) -> list[str]:
        return [self.prompt(seed) for seed in range(count)]

    def body(self, seed: int) -> dict[str, Any]:
        """Of a request over HTTP."""
        return {
            "prompt": self.prompt(seed),
            "seed": seed,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
        }

    async def draw(
        self, seed: int, *, steps: int | None = None, on_step: Callable[[int], None] = lambda steps_done: None
    ) -> None:
        """on_step: called with the number of steps that are done. steps: None: the usual number, and what comes of that
        has to be the same each time."""
        params = ImageParams(seed=seed, steps=steps or self.steps, guidance=self.guidance)
        picture: Picture | None = None
        async with self._engine.generate_image(self.prompt(seed), params) as stream:
            async for delta in stream:
                on_step(delta.steps_done)
                picture = delta.picture
        assert picture is not None, f"there is no picture of seed {seed}"
        if steps is None:
            self.note(seed, picture)

    def note(self, seed: int, picture: Picture) -> None:
        """The engine has made this one; it must not have made another one of the same seed."""
        assert self._made.setdefault(seed, picture) == picture, f"seed {seed} gave two pictures"

    def compare(self, seeds: Sequence[int], pictures: Sequence[Picture]) -> None:
        """With what the pipeline has made of the same seeds: the same but for rounding."""
        for seed, picture in zip(seeds, pictures, strict=True):
            made = self._made[seed]
            assert (made.width, made.height) == (picture.width, picture.height)
            apart = max(abs(one - other) for one, other in zip(made.rgb, picture.rgb, strict=True))
            assert apart <= LEVELS_APART_MAX, f"seed {seed}: the pipeline's picture is {apart} levels away"
