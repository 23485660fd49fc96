"""Checks langchain-ollama: chat, a stream, a tool and structured output."""

import pydantic
from _env import MODEL, ROOT
from langchain_core.tools import tool
from langchain_ollama import ChatOllama

model = ChatOllama(model=MODEL, base_url=ROOT, temperature=0, num_predict=500)


class User(pydantic.BaseModel):
    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


said = model.invoke("What is 17 + 25?")
assert said.content == "42", said
assert said.usage_metadata["output_tokens"] > 0, said
assert "".join(piece.content for piece in model.stream("Count from 1 to 5.")) == "1, 2, 3, 4, 5."
[call] = model.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"}), call
made = model.with_structured_output(User, method="json_schema").invoke("Jason is 25 years old.")
assert made == User(name="Jason", age=25), made
print("ok")
