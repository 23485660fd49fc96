// Checks the Responses API with openai-node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE_URL, KEY, MODEL, WEATHER } from "./env.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0 });
const User = z.object({ name: z.string(), age: z.number().int() });
const whole = await client.responses.create({ model: MODEL, input: "What is 17 + 25?" });
assert.equal(whole.output_text, "42");
const tool = { type: "function", strict: true, ...WEATHER };
const stream = client.responses.stream({ model: MODEL, input: "What is the weather in Paris?", tools: [tool] });
const final = await stream.finalResponse();
const call = final.output.find((item) => item.type === "function_call");
assert.equal(call.arguments, '{"city": "Paris"}');
const parsed = await client.responses.parse({
  model: MODEL,
  input: "Jason is 25 years old.",
  text: { format: zodTextFormat(User, "user") },
});
assert.deepEqual(parsed.output_parsed, { name: "Jason", age: 25 });
console.log("ok");
