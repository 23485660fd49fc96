"""Checks LangChain: ChatOpenAI with tools, streams and all methods of structured output, and create_agent."""

from _env import BASE_URL, KEY, MODEL
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class User(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees"


model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, max_retries=0)
assert model.invoke("What is 17 + 25?").content == "42"
assert "".join(str(chunk.content) for chunk in model.stream("Count from 1 to 5.")) == "1, 2, 3, 4, 5."

[call] = model.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})

for method in ("json_schema", "function_calling", "json_mode"):
    structured = model.with_structured_output(User, method=method)
    assert structured.invoke("Jason is 25 years old. Reply in JSON.") == User(name="Jason", age=25), method

agent = create_agent(model, tools=[get_weather])
result = agent.invoke({"messages": [{"role": "user", "content": "What is the weather in Paris?"}]})
assert result["messages"][-1].content == "It is 18 degrees in Paris.", result
agent = create_agent(model, tools=[], response_format=User)
result = agent.invoke({"messages": [{"role": "user", "content": "Jason is 25 years old."}]})
assert result["structured_response"] == User(name="Jason", age=25), result
print("ok")
