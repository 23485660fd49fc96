"""Checks LlamaIndex: OpenAILike with chat, a stream, a tool and structured output."""

from _env import BASE_URL, KEY, MODEL
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees"


llm = OpenAILike(
    model=MODEL,
    api_base=BASE_URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
    context_window=100_000,
)
assert llm.chat([ChatMessage(role="user", content="What is 17 + 25?")]).message.content == "42"
pieces = [piece.delta or "" for piece in llm.stream_chat([ChatMessage(role="user", content="Count from 1 to 5.")])]
assert "".join(pieces) == "1, 2, 3, 4, 5."
said = llm.predict_and_call([FunctionTool.from_defaults(get_weather)], "What is the weather in Paris?")
assert said.sources[0].raw_output == "18 degrees", said
assert llm.as_structured_llm(User).complete("Jason is 25 years old.").raw == User(name="Jason", age=25)
print("ok")
