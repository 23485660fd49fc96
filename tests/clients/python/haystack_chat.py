"""Checks haystack: the chat generator with a tool, a schema and a stream."""

from _env import BASE_URL, KEY, MODEL, WEATHER
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


def generator(**options):
    return OpenAIChatGenerator(
        model=MODEL, api_base_url=BASE_URL, api_key=Secret.from_token(KEY), max_retries=0, **options
    )


weather = Tool(function=lambda city: "18 degrees", **WEATHER)
[reply] = generator().run([ChatMessage.from_user("What is 17 + 25?")])["replies"]
assert reply.text == "42"
pieces = []
generator(streaming_callback=lambda chunk: pieces.append(chunk.content)).run(
    [ChatMessage.from_user("Count from 1 to 5.")]
)
assert "".join(pieces) == "1, 2, 3, 4, 5."
ask = ChatMessage.from_user("What is the weather in Paris?")
[reply] = generator(tools=[weather]).run([ask])["replies"]
assert reply.tool_calls[0].arguments == {"city": "Paris"}
told = ChatMessage.from_tool("18 degrees", origin=reply.tool_calls[0])
[reply] = generator(tools=[weather]).run([ask, reply, told])["replies"]
assert reply.text == "It is 18 degrees in Paris."
schema = {"generation_kwargs": {"response_format": User}}
[reply] = generator(**schema).run([ChatMessage.from_user("Jason is 25 years old.")])["replies"]
assert User.model_validate_json(reply.text) == User(name="Jason", age=25)
print("ok")
