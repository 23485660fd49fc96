// Checks the Vercel AI SDK: openai(model) with the Responses API (its default) and with chat, generateText with tools,
// generateObject, streamText, abortSignal, and the OpenAI-compatible provider.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { BASE_URL, KEY, MODEL } from "./env.mjs";

const openai = createOpenAI({ baseURL: BASE_URL, apiKey: KEY });
const compatible = createOpenAICompatible({
  name: "trioserve",
  baseURL: BASE_URL,
  apiKey: KEY,
  supportsStructuredOutputs: true,
});
const only = process.env.VERCEL_ONLY;
const models = { compatible: compatible(MODEL), chat: openai.chat(MODEL), responses: openai(MODEL) };
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (assert.equal(city, "Paris"), "18 degrees"),
  }),
};
for (const [name, model] of Object.entries(models)) {
  if (only && only !== name) continue;
  const options = { model, maxRetries: 0 };
  assert.equal((await generateText({ ...options, prompt: "What is 17 + 25?" })).text, "42", name);
  const called = await generateText({
    ...options,
    prompt: "What is the weather in Paris?",
    tools,
    stopWhen: stepCountIs(3),
  });
  assert.equal(called.text, "It is 18 degrees in Paris.", name);
  const { object } = await generateObject({
    ...options,
    prompt: "Jason is 25 years old.",
    schema: z.object({ name: z.string(), age: z.number().int() }),
  });
  assert.deepEqual(object, { name: "Jason", age: 25 }, name);
  let text = "";
  for await (const piece of streamText({ ...options, prompt: "Count from 1 to 5." }).textStream) text += piece;
  assert.equal(text, "1, 2, 3, 4, 5.", name);
  const abort = new AbortController();
  const left = streamText({ ...options, prompt: "x".repeat(5000), abortSignal: abort.signal, onError() {} });
  for await (const part of left.fullStream) {
    if (part.type === "text-delta") abort.abort();
  }
  console.log(name);
}
console.log("ok");
