// Checks LangChain.js: ChatOpenAI with tools and structured output, and createAgent.
import assert from "node:assert/strict";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent } from "langchain";
import { z } from "zod";
import { BASE_URL, KEY, MODEL } from "./env.mjs";

const model = new ChatOpenAI({ model: MODEL, apiKey: KEY, configuration: { baseURL: BASE_URL }, maxRetries: 0 });
const User = z.object({ name: z.string(), age: z.number().int() });
const weather = tool(async ({ city }) => (assert.equal(city, "Paris"), "18 degrees"), {
  name: "get_weather",
  description: "The weather of a city.",
  schema: z.object({ city: z.string() }),
});
assert.equal((await model.invoke("What is 17 + 25?")).content, "42");
let text = "";
for await (const chunk of await model.stream("Count from 1 to 5.")) text += chunk.content;
assert.equal(text, "1, 2, 3, 4, 5.");
const called = await model.bindTools([weather]).invoke("What is the weather in Paris?");
assert.deepEqual(called.tool_calls[0].args, { city: "Paris" });
for (const method of ["jsonSchema", "functionCalling", "jsonMode"]) {
  const structured = model.withStructuredOutput(User, { name: "User", method });
  assert.deepEqual(await structured.invoke("Jason is 25 years old. JSON."), { name: "Jason", age: 25 }, method);
}
const agent = createAgent({ model, tools: [weather] });
const { messages } = await agent.invoke({ messages: [{ role: "user", content: "What is the weather in Paris?" }] });
assert.equal(messages.at(-1).content, "It is 18 degrees in Paris.");
console.log("ok");
