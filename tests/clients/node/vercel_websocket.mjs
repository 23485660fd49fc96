// Checks the Vercel AI SDK over a websocket: its fetch over a websocket, with steps that call a tool on one connection.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createWebSocketFetch } from "@vercel/ai-sdk-openai-websocket-fetch";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { BASE_URL, KEY, MODEL } from "./env.mjs";

const socketFetch = createWebSocketFetch({ url: BASE_URL.replace("http", "ws") + "/responses" });
const openai = createOpenAI({ baseURL: BASE_URL, apiKey: KEY, fetch: socketFetch });
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (assert.equal(city, "Paris"), "18 degrees"),
  }),
};
const options = { model: openai(MODEL), maxRetries: 0 };
const called = streamText({ ...options, prompt: "What is the weather in Paris?", tools, stopWhen: stepCountIs(3) });
assert.equal(await called.text, "It is 18 degrees in Paris.");
assert.equal((await called.steps).length, 2);
let text = "";
for await (const piece of streamText({ ...options, prompt: "Count from 1 to 5." }).textStream) text += piece;
assert.equal(text, "1, 2, 3, 4, 5.");
let failure;
const refused = streamText({ ...options, model: openai("unknown"), prompt: "Hi", onError: ({ error }) => (failure = error) });
await refused.consumeStream();
assert.match(JSON.stringify(failure, Object.getOwnPropertyNames(failure ?? {})), /model/);
socketFetch.close();
console.log("ok");
