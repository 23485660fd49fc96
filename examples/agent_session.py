"""An agent with two tools inside of a Trio program. Each turn sends only what is new, and its KV waits for the tool.

It is the agent of docs/tutorials/agent.md without a server.

python examples/agent_session.py
"""

import json

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
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


FUNCTIONS = {"weather": weather, "add": add}
TOOLS = [
    tool("weather", "Weather of a city.", {"city": "string"}),
    tool("add", "Add two numbers.", {"a": "integer", "b": "integer"}),
]
ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
SAMPLING = trioserve.SamplingParams(temperature=0, max_tokens=100)


async def run_agent(engine: trioserve.Engine, question: str) -> None:
    answer = trioserve.StructuredOutput.json(ANSWER)
    # If the agent is cancelled, its turn ends and the engine releases its blocks. The same happens at the end.
    async with engine.session() as session:
        reply = await session.respond(question, SAMPLING, tools=TOOLS, tool_choice="required", strict=True)
        results = []
        for call in reply.tool_calls:
            result = FUNCTIONS[call.name](**json.loads(call.arguments))
            print(f"  {call.name}({call.arguments}) -> {result}")
            results.append({"role": "tool", "tool_call_id": call.id, "content": result})
        sampling = trioserve.SamplingParams(temperature=0, max_tokens=100, structured=answer)
        reply = await session.respond(results, sampling)
        print(" ", reply.content)
        print(f"  prompt tokens from the cache: {reply.cached_token_count}")


async def main() -> None:
    async with trioserve.open_engine("smollm2", max_num_seqs=8) as engine:
        for question in ("What is the weather in Oslo today?", "What is 17 plus 25?"):
            print(question)
            with trio.move_on_after(60):
                await run_agent(engine, question)


if __name__ == "__main__":
    trio.run(main)
