"""Checks smolagents: a ToolCallingAgent with one tool."""

from _env import BASE_URL, KEY, MODEL
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return "18 degrees"


model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=KEY)
agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=3, verbosity_level=0)
assert agent.run("What is the weather in Paris?") == "It is 18 degrees in Paris."
print("ok")
