"""Checks openai-agents with the Responses API: an agent that calls a function, and one with an output type.

The agents run over HTTP, and then over a websocket, where all turns share one connection.
"""

import asyncio
import contextlib

from _env import BASE_URL, KEY, MODEL
from agents import (
    Agent,
    Runner,
    function_tool,
    responses_websocket_session,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0), use_for_tracing=False)
TRANSPORTS = {
    "http": lambda: contextlib.nullcontext(Runner),
    "websocket": lambda: responses_websocket_session(base_url=BASE_URL, api_key=KEY),
}


class User(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "18 degrees"


async def run_agents(runner):
    agent = Agent(name="weather", instructions="Help.", model=MODEL, tools=[get_weather])
    result = await runner.run(agent, "What is the weather in Paris?")
    assert result.final_output == "It is 18 degrees in Paris.", result

    streamed = runner.run_streamed(agent, "What is the weather in Paris?")
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds
    assert streamed.final_output == "It is 18 degrees in Paris."

    again = await runner.run(agent, "What is 17 + 25?", previous_response_id=result.last_response_id)
    assert again.final_output == "42", again

    typed = Agent(name="extract", instructions="Extract.", model=MODEL, output_type=User)
    result = await runner.run(typed, "Jason is 25 years old.")
    assert result.final_output == User(name="Jason", age=25), result


async def main():
    for name, opened in TRANSPORTS.items():
        async with opened() as runner:
            await run_agents(runner)
        print(name)


asyncio.run(main())
print("ok")
