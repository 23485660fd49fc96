"""Checks LiteLLM: chat, a stream, tools, a class as schema, the error for a too long prompt, messages and responses."""

import litellm
from _env import BASE_URL, KEY, MODEL, ROOT, WEATHER
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


litellm.suppress_debug_info = True
server = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "num_retries": 0}


def said(text, **options):
    return litellm.completion(messages=[{"role": "user", "content": text}], **server, **options)


assert said("What is 17 + 25?").choices[0].message.content == "42"
pieces = [chunk.choices[0].delta.content or "" for chunk in said("Count from 1 to 5.", stream=True)]
assert "".join(pieces) == "1, 2, 3, 4, 5."
called = said("What is the weather in Paris?", tools=[{"type": "function", "function": WEATHER}])
assert called.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'
parsed = said("Jason is 25 years old.", response_format=User)
assert User.model_validate_json(parsed.choices[0].message.content) == User(name="Jason", age=25)
try:
    said("Hello", max_tokens=10**8)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("no error for a long context")
response = litellm.responses(input="What is 17 + 25?", **server)
assert response.output[-1].content[0].text == "42"
message = litellm.completion(
    model=f"anthropic/{MODEL}",
    api_base=ROOT,
    api_key=KEY,
    messages=[{"role": "user", "content": "What is 17 + 25?"}],
    max_tokens=500,
)
assert message.choices[0].message.content == "42"
print("ok")
