"""The images that the benchmark requests. It checks that each one is independent of the others in its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trioserve.contracts.image_generation import ImageParams, RGBImage
from trioserve.engine.images.image_engine import ImageEngine

__all__ = ["ImageRequester"]

CLASSES_MAX = 10
# of 255. A batch adds numbers in another order, so a value at the edge may be rounded differently.
LEVELS_APART_MAX = 2


class ImageRequester:
    """Requests and results, by seed. The seed also chooses the prompt.

    Args:
        engine: the engine.
        steps: default number of denoising steps.
        guidance: guidance scale.
    """

    def __init__(self, engine: ImageEngine, *, steps: int, guidance: float) -> None:
        self._engine = engine
        self.steps, self.guidance = steps, guidance
        self.steps_max = engine.limits.steps_max
        self._made: dict[int, RGBImage] = {}

    def prompt(self, seed: int) -> str:
        classes = self._engine.model.classes
        return f"picture {seed}" if classes is None else classes[seed % min(CLASSES_MAX, len(classes))]

    def prompts(self, count: int) -> list[str]:
        return [self.prompt(seed) for seed in range(count)]

    def body(self, seed: int) -> dict[str, Any]:
        """Return the JSON body of a request over HTTP.

        Args:
            seed: seed of the image.
        """
        return {
            "prompt": self.prompt(seed),
            "seed": seed,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
        }

    async def draw(
        self, seed: int, *, steps: int | None = None, on_step: Callable[[int], None] = lambda steps_done: None
    ) -> None:
        """Generate one image.

        Args:
            seed: seed of the image.
            steps: number of denoising steps. None: the default number, whose result must be the same each time.
            on_step: called with the number of steps done.
        """
        params = ImageParams(seed=seed, steps=steps or self.steps, guidance=self.guidance)
        image: RGBImage | None = None
        async with self._engine.generate_image(self.prompt(seed), params) as stream:
            async for delta in stream:
                on_step(delta.steps_done)
                image = delta.image
        assert image is not None, f"there is no image with seed {seed}"
        if steps is None:
            self.note(seed, image)

    def note(self, seed: int, image: RGBImage) -> None:
        """Record an image, and assert that the engine made no other image with that seed.

        Args:
            seed: seed of the image.
            picture: the image.
        """
        assert self._made.setdefault(seed, image) == image, f"seed {seed} gave two different images"

    def compare(self, seeds: Sequence[int], pictures: Sequence[RGBImage]) -> None:
        """Assert that the pipeline made the same images, except for rounding.

        Args:
            seeds: seeds of the images.
            pictures: images of the pipeline.
        """
        for seed, image in zip(seeds, pictures, strict=True):
            made = self._made[seed]
            assert (made.width, made.height) == (image.width, image.height)
            apart = max(abs(one - other) for one, other in zip(made.rgb, image.rgb, strict=True))
            assert apart <= LEVELS_APART_MAX, f"seed {seed}: the pipeline's image differs by {apart} levels"
