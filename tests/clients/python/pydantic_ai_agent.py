"""Checks pydantic-ai with chat completions and responses: an agent with a tool, and its three kinds of typed output."""

from _env import BASE_URL, KEY, MODEL
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class User(BaseModel):
    name: str
    age: int


provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0))
for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        assert city == "Paris"
        return "18 degrees"

    assert agent.run_sync("What is the weather in Paris?").output == "It is 18 degrees in Paris.", model
    for output_type in (User, NativeOutput(User), PromptedOutput(User)):
        result = Agent(model, output_type=output_type).run_sync("Jason is 25 years old.")
        assert result.output == User(name="Jason", age=25), (model, output_type)
print("ok")
