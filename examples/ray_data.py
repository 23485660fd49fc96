"""Use Ray Data: an actor with an engine responds to the rows of a data set. Breaking the loop cancels all requests.

pip install "trioserve[ray]" "ray[data]"
python examples/ray_data.py
"""

import asyncio

import ray.data

import trioserve
import trioserve.asyncio


class Answers:
    """Sends one request for each row. Ray Data creates the object in an actor, and calls it for many rows."""

    def __init__(self, model: str) -> None:
        self._opening = trioserve.asyncio.open_engine(model)
        self._opened: asyncio.Task[trioserve.asyncio.Engine] | None = None

    async def __call__(self, row: dict[str, str]) -> dict[str, str]:
        async with asyncio.timeout(120):  # The timer keeps a reference to this task, because Ray Data keeps none.
            if self._opened is None:
                self._opened = asyncio.create_task(self._opening.__aenter__())
            engine = await asyncio.shield(self._opened)
            prompt = trioserve.ChatPrompt(messages=[{"role": "user", "content": row["question"]}])
            sampling = trioserve.SamplingParams(max_tokens=16, temperature=0.0)
            async with engine.generate(prompt, sampling) as stream:
                return row | {"answer": "".join([delta.text async for delta in stream])}


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    places = ["Kenya", "Peru", "Norway", "Japan"] * 50
    questions = ray.data.from_items([{"question": f"Name a river in {place}."} for place in places])
    answers = questions.map(Answers, fn_constructor_args=["smollm2"], compute=ray.data.ActorPoolStrategy(size=1))
    for count, row in enumerate(answers.iter_rows(), 1):
        print(row["question"], row["answer"].replace("\n", " "))
        if count == 4:
            break  # This cancels all unfinished requests.
    ray.shutdown()


if __name__ == "__main__":
    main()
