"""Checks openai-agents in its default mode (Responses): an agent that calls a function, and one with an output type."""

import asyncio

from _env import BASE_URL, KEY, MODEL
from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0), use_for_tracing=False)


class User(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "18 degrees"


async def main() -> None:
    agent = Agent(name="weather", instructions="Help.", model=MODEL, tools=[get_weather])
    result = await Runner.run(agent, "What is the weather in Paris?")
    assert result.final_output == "It is 18 degrees in Paris.", result

    streamed = Runner.run_streamed(agent, "What is the weather in Paris?")
    async for _event in streamed.stream_events():
        pass
    assert streamed.final_output == "It is 18 degrees in Paris."

    typed = Agent(name="extract", instructions="Extract.", model=MODEL, output_type=User)
    result = await Runner.run(typed, "Jason is 25 years old.")
    assert result.final_output == User(name="Jason", age=25), result


asyncio.run(main())
print("ok")
