// Checks openai-node: chat, streams, tools, parsing with zod, and responses.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE_URL, KEY, MODEL, WEATHER } from "./env.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0 });
const User = z.object({ name: z.string(), age: z.number().int() });
const ask = [{ role: "user", content: "What is the weather in Paris?" }];
const tools = [{ type: "function", function: WEATHER }];

const whole = await client.chat.completions.create({
  model: MODEL,
  messages: [{ role: "user", content: "What is 17 + 25?" }],
});
assert.equal(whole.choices[0].message.content, "42");

const stream = client.chat.completions.stream({ model: MODEL, messages: ask, tools });
const final = await stream.finalChatCompletion();
assert.equal(final.choices[0].message.tool_calls[0].function.arguments, '{"city": "Paris"}');

const runner = client.chat.completions.runTools({
  model: MODEL,
  messages: ask,
  tools: [
    {
      type: "function",
      function: { ...WEATHER, parse: JSON.parse, function: ({ city }) => (assert.equal(city, "Paris"), "18 degrees") },
    },
  ],
});
assert.equal(await runner.finalContent(), "It is 18 degrees in Paris.");

const parsed = await client.chat.completions.parse({
  model: MODEL,
  messages: [{ role: "user", content: "Jason is 25 years old." }],
  response_format: zodResponseFormat(User, "user"),
});
assert.deepEqual(parsed.choices[0].message.parsed, { name: "Jason", age: 25 });

// The client leaves this stream early, which must not raise an error.
const left = await client.chat.completions.create({
  model: MODEL,
  stream: true,
  messages: [{ role: "user", content: "Count from 1 to 5." }],
});
for await (const _ of left) break;
console.log("ok");
