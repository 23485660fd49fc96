"""Checks openai-agents over a websocket: an agent that calls a function, streamed and whole, on one connection."""

import asyncio

from _env import BASE_URL, KEY, MODEL
from agents import Agent, function_tool, responses_websocket_session, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "18 degrees"


async def main() -> None:
    agent = Agent(name="weather", instructions="Help.", model=MODEL, tools=[get_weather])
    async with responses_websocket_session(base_url=BASE_URL, api_key=KEY) as session:
        result = await session.run(agent, "What is the weather in Paris?")
        assert result.final_output == "It is 18 degrees in Paris.", result

        streamed = session.run_streamed(agent, "What is the weather in Paris?")
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds
        assert streamed.final_output == "It is 18 degrees in Paris."

        last = result.last_response_id
        again = await session.run(agent, "What is 17 + 25?", previous_response_id=last)
        assert again.final_output == "42", again


asyncio.run(main())
print("ok")
