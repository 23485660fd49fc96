// Checks openai-node: embeddings, files and batches.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";
import { BASE_URL, KEY, MODEL } from "./env.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0 });
const made = await client.embeddings.create({ model: MODEL, input: ["Hello", "World"] });
assert.equal(made.data.length, 2);
assert.ok(made.data[0].embedding.length > 1);

const body = { model: MODEL, messages: [{ role: "user", content: "Number 1" }] };
const line = { custom_id: "one", method: "POST", url: "/v1/chat/completions", body };
const file = await client.files.create({
  file: await toFile(Buffer.from(JSON.stringify(line)), "batch.jsonl"),
  purpose: "batch",
});
let batch = await client.batches.create({
  input_file_id: file.id,
  endpoint: "/v1/chat/completions",
  completion_window: "24h",
});
for (let i = 0; i < 200 && !["completed", "failed"].includes(batch.status); i++) {
  await new Promise((done) => setTimeout(done, 50));
  batch = await client.batches.retrieve(batch.id);
}
assert.equal(batch.status, "completed");
const result = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
assert.equal(result.response.body.choices[0].message.content, "You said: Number 1");
console.log("ok");
