"""An agent with two tools on one websocket connection. Each turn sends only what is new, and nothing is stored.

It is the agent of docs/tutorials/agent.md with a warm-up, and with one conversation for all questions.

pip install openai websockets
python examples/agent_over_websocket.py
"""

import functools
import json

import openai
import trio

import trioserve


def weather(city: str) -> str:
    return f"sun, 18 degrees in {city}"


def add(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}"


def tool(name: str, description: str, properties: dict[str, str]) -> dict:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": description, "strict": True, "parameters": schema}


FUNCTIONS = {"weather": weather, "add": add}
TOOLS = [
    tool("weather", "Weather of a city.", {"city": "string"}),
    tool("add", "Add two numbers.", {"a": "integer", "b": "integer"}),
]
ANSWER = {
    "type": "json_schema",
    "name": "answer",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
        "additionalProperties": False,
    },
}


class Agent:
    """A conversation on a connection. The server has all of its earlier items."""

    def __init__(self, connection) -> None:
        self.connection = connection
        self.previous: str | None = None
        self.options = {"model": "smollm2", "store": False, "temperature": 0, "max_output_tokens": 60}

    def prepare(self, instructions: str) -> None:
        """Let the server compute the prompt that all turns share, before there is a question."""
        self.options |= {"instructions": instructions, "tools": TOOLS, "parallel_tool_calls": False}
        self.turn([], generate=False)

    def ask(self, question: str) -> str:
        response = self.turn([{"role": "user", "content": question}], tool_choice="required")
        [call] = [item for item in response.output if item.type == "function_call"]
        result = FUNCTIONS[call.name](**json.loads(call.arguments))
        print(f"  {call.name}({call.arguments}) -> {result}")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
        response = self.turn([output], tool_choice="none", text={"format": ANSWER})
        return json.loads(response.output_text)["answer"]

    def turn(self, items: list[dict], **more):
        self.connection.response.create(input=items, previous_response_id=self.previous, **self.options, **more)
        for event in self.connection:
            if event.type in ("error", "response.failed"):
                raise RuntimeError(event.to_json())
            if event.type in ("response.completed", "response.incomplete"):
                break
        usage = event.response.usage
        print(f"  prompt: {usage.input_tokens} tokens, {usage.input_tokens_details.cached_tokens} of them cached")
        self.previous = event.response.id
        return event.response


def run_agent(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    with client.responses.connect() as connection:
        agent = Agent(connection)
        agent.prepare("Use a tool for each question.")
        for question in ["What is the weather in Oslo today?", "What is 17 plus 25?"]:
            print(question)
            print(" ", agent.ask(question))


async def main() -> None:
    async with trioserve.open_engine("smollm2") as engine, trio.open_nursery() as nursery:
        [url] = await nursery.start(functools.partial(trioserve.serve, engine, port=0))
        await trio.to_thread.run_sync(run_agent, url)
        await engine.wait_all_free()
        print("KV blocks in use:", engine.stats().blocks_used)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
