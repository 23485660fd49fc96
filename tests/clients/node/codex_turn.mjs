// Checks the command line of Codex: one turn with its shell tool, over HTTP and over a websocket.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { BASE_URL, KEY, MODEL } from "./env.mjs";

const modules = process.env.TRIOSERVE_NODE_MODULES ?? join(dirname(fileURLToPath(import.meta.url)), "node_modules");
for (const overWebsocket of [false, true]) {
  const home = mkdtempSync(join(tmpdir(), "codex-"));
  writeFileSync(
    join(home, "config.toml"),
    `model = "${MODEL}"
model_provider = "ours"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.ours]
name = "trioserve"
base_url = "${BASE_URL}"
env_key = "TRIOSERVE_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
supports_websockets = ${overWebsocket}
`,
  );
  try {
    const run = spawnSync(
      join(modules, ".bin", "codex"),
      ["exec", "--skip-git-repo-check", "--json", "Please print the word pineapple in a shell."],
      { cwd: home, env: { ...process.env, CODEX_HOME: home, TRIOSERVE_KEY: KEY }, encoding: "utf8", timeout: 120_000, input: "" },
    );
    console.log(run.stdout.slice(-4000), run.stderr.slice(-4000));
    assert.equal(run.status, 0);
    const items = run.stdout.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
    const done = items.filter((event) => event.type === "item.completed").map((event) => event.item);
    const command = done.find((item) => item.type === "command_execution");
    assert.ok(command, "no command was run");
    assert.match(command.aggregated_output, /pineapple/);
    assert.ok(done.some((item) => item.type === "agent_message" && item.text === "The shell printed pineapple."));
  } finally {
    rmSync(home, { recursive: true, force: true });
  }
}
console.log("ok");
