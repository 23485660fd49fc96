"""Checks instructor: its modes for OpenAI's API and Anthropic's API."""

import anthropic
import instructor
from _env import BASE_URL, KEY, MODEL, ROOT
from openai import OpenAI
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


TOOL_MODES = ["FUNCTIONS", "PARALLEL_TOOLS", "RESPONSES_TOOLS", "TOOLS", "TOOLS_STRICT"]
JSON_MODES = ["JSON", "JSON_O1", "JSON_SCHEMA", "MD_JSON"]
for name in TOOL_MODES + JSON_MODES:
    mode = getattr(instructor.Mode, name, None)
    if mode is None:
        print("this version has no mode", name)
        continue
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0), mode=mode)
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Jason is 25 years old."}], "max_retries": 0}
    if name == "PARALLEL_TOOLS":
        from collections.abc import Iterable

        made = list(client.chat.completions.create(response_model=Iterable[User], **ask))
        assert [one.model_dump() for one in made] == [{"name": "Jason", "age": 25}], (name, made)
        continue
    made = client.chat.completions.create(response_model=User, **ask)
    assert made.model_dump() == {"name": "Jason", "age": 25}, (name, made)
    print(name)
for name in ("ANTHROPIC_TOOLS", "ANTHROPIC_JSON"):
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0), mode=getattr(instructor.Mode, name)
    )
    made = client.chat.completions.create(response_model=User, max_tokens=500, **ask)
    assert made.model_dump() == {"name": "Jason", "age": 25}, (name, made)
    print(name)
print("ok")
