/** Chats with the model, with several responses side by side. */

import { eventsOf, key } from "./asking.js";
import { markDifferences } from "./difference.js";
import { feed } from "./feed.js";
import { blocksOf, count, duration, el, figure, find, freed, many, on, say, show, write } from "./words.js";

const NUMBERS = { temperature: "Temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p", max_tokens: "Tokens at most", seed: "Seed", timeout: "Timeout, s" };
const TOKENS_MAX = 400; // to begin with
const TOOLS = [{ type: "function", function: { name: "get_weather", description: "The weather at a place", parameters: {
	type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const SCHEMA = { type: "object", properties: { name: { type: "string" }, length_km: { type: "integer" } }, required: ["name", "length_km"], additionalProperties: false };

/** A running response and its elements. */
class Answer {
	text = "";
	calls = [];
	usage = null;
	isOver = false;
	request = null; // as the feed last had it
	#abort = new AbortController();
	#beganAt = performance.now();
	#firstAt = null;
	#endedAt = null;
	#ending = "";

	constructor(body, title) {
		this.id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
		this.body = body;
		this.thought = el("details.thought", { hidden: true }, el("summary", {}, "Thought"), (this.thoughtText = el("pre")));
		this.output = el("div.text");
		this.callList = el("div.calls");
		this.figures = el("p.aside");
		this.squares = el("span.squares", { "aria-hidden": "true" });
		this.blocksText = el("span");
		this.stopButton = el("button", { type: "button", onclick: () => this.stop(), "aria-label": `Stop ${title}` }, "Stop");
		this.goOn = el("button", { type: "button", hidden: true, onclick: () => goOn(this) }, "Go on with this one");
		this.element = el("article.answer", { "aria-label": title, "aria-busy": "true" },
			el("header", {}, el("h3", {}, title), this.stopButton, this.goOn),
			this.thought, this.output, this.callList, el("p.blocks-line.aside", {}, this.squares, this.blocksText), this.figures);
		this.run();
	}

	get isStopped() { return this.#ending === "stopped"; }

	stop() {
		this.#ending = "stopped";
		this.#abort.abort();
	}

	async run() {
		try {
			const headers = { "Content-Type": "application/json", "X-Request-Id": this.id };
			const response = await key.ask("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(this.body), signal: this.#abort.signal });
			for await (const events of eventsOf(response)) {
				for (const [, data] of events) if (data !== "[DONE]") this.#take(JSON.parse(data));
				this.show();
			}
		} catch (error) {
			if (!this.isStopped) this.#fail(error.message);
		}
		this.#endedAt = performance.now();
		this.isOver = true;
		this.element.setAttribute("aria-busy", "false");
		show(this.stopButton, false);
		this.show();
		onEnd();
	}

	#fail(text) {
		this.#ending = "failed";
		this.element.append(el("p.error", { role: "alert" }, text));
	}

	#take(event) {
		if (event.error) return this.#fail(event.error.message ?? "the response broke off");
		if (event.usage) this.usage = event.usage;
		const choice = event.choices?.[0];
		if (!choice) return;
		const { content, reasoning_content: thought, reasoning, tool_calls: calls } = choice.delta ?? {};
		if ((content || thought || reasoning || calls) && this.#firstAt === null) this.#firstAt = performance.now();
		if (content) {
			this.text += content;
			this.output.append(content);
		}
		if (thought || reasoning) {
			show(this.thought, true);
			this.thoughtText.append(thought || reasoning);
		}
		for (const part of calls ?? []) {
			const call = (this.calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
			call.function.name += part.function?.name ?? "";
			call.function.arguments += part.function?.arguments ?? "";
		}
		if (choice.finish_reason) this.#ending = choice.finish_reason;
	}

	/** request: the feed's state of it, if any. */
	see(request) {
		if (request) this.request = { ...request };
		this.show();
	}

	show() {
		this.calls.forEach((call, index) => {
			const line = this.callList.children[index] ?? this.callList.appendChild(el("pre.call"));
			write(line, `${call.function.name}(${call.function.arguments})`);
		});
		const { request } = this, tokens = this.usage?.completion_tokens ?? request?.completion_tokens;
		const end = this.#endedAt ?? performance.now();
		const parts = [this.isOver ? { stop: "finished", length: "reached its limit of tokens", tool_calls: "calls a tool" }[this.#ending] ?? this.#ending : this.#firstAt ? "streaming" : "waiting"];
		if (tokens) parts.push(many(tokens, "token"));
		if (this.#firstAt !== null) {
			parts.push(`first token after ${duration((this.#firstAt - this.#beganAt) / 1000)}`);
			if (tokens > 1 && end > this.#firstAt) parts.push(`${figure((tokens - 1) / ((end - this.#firstAt) / 1000))} tokens/s`);
		}
		const cached = this.usage?.prompt_tokens_details?.cached_tokens ?? request?.cached_tokens;
		if (cached) parts.push(`${count(cached)} of ${count(this.usage?.prompt_tokens ?? request.prompt_tokens)} prompt tokens cached`);
		write(this.figures, parts.filter(Boolean).join(" · "));
		this.#showBlocks(request);
	}

	#showBlocks(request) {
		const now = request && request.ended_at == null ? blocksOf(request) : 0;
		if (now) this.blocksHeld = now;
		const isBack = this.isOver && this.blocksHeld > 0 && request?.ended_at != null;
		this.squares.style.width = `${Math.min(this.blocksHeld ?? 0, 48) * 9 - (this.blocksHeld ? 2 : 0)}px`;
		this.squares.classList.toggle("back", isBack);
		const text = request && freed(request) ? `stopped: ${freed(request)}`
			: isBack ? `${many(this.blocksHeld, "block")} back`
			: this.blocksHeld ? many(this.blocksHeld, "KV block") : "";
		write(this.blocksText, text);
		if (request?.freed && !this.isTold) {
			this.isTold = true;
			say(`Stopped: ${freed(request)}`);
		}
	}
}

let messages = [];
let answers = [];
let isComparing = false;

/** Names that requests may use. */
export async function readModels() {
	const select = find("ask-model");
	try {
		const response = await key.ask("v1/models");
		const names = (await response.json()).data.map((model) => model.id);
		const chosen = select.value;
		select.replaceChildren(...names.map((name) => el("option", {}, name)));
		if (names.includes(chosen)) select.value = chosen;
	} catch {
		// the feed reports a lost connection, and reconnects
	}
}

/** The blocks of a stopped response are free one step later. */
function hasSaidAll({ isStopped }, request) {
	return request.ended_at != null && (!isStopped || Boolean(request.freed));
}

export function update() {
	const { requests } = feed.state;
	const open = answers.filter((answer) => !answer.isSettled);
	if (!open.length) return;
	const byId = new Map(Object.values(requests).map((request) => [request.id, request]));
	for (const answer of open) {
		const request = byId.get(answer.id);
		answer.see(request);
		answer.isSettled = answer.isOver && answer.request !== null && (!request || hasSaidAll(answer, request));
	}
}

function number(name) {
	const input = find(`ask-${name}`), text = input.value.trim();
	if (!text) return undefined;
	const value = Number(text);
	if (Number.isFinite(value)) return value;
	input.focus();
	throw new Error(`"${text}" is no number (${name})`);
}

function json(name, what) {
	const text = find(`ask-${name}`).value.trim(), error = find(`ask-${name}-error`);
	write(error, "");
	if (!text) return undefined;
	try {
		return JSON.parse(text);
	} catch (cause) {
		find(`ask-${name}`).closest("details").open = true;
		find(`ask-${name}`).focus();
		write(error, `This is no JSON: ${cause.message}`);
		throw new Error(`The ${what} cannot be read: see above.`);
	}
}

function asked() {
	const system = find("ask-system").value.trim(), stop = find("ask-stop").value;
	const body = { model: find("ask-model").value || undefined, stream: true, stream_options: { include_usage: true },
		messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
	for (const name in NUMBERS) body[name] = number(name);
	if (stop) body.stop = [stop];
	const tools = json("tools", "list of tools"), schema = json("schema", "schema");
	if (tools?.length) Object.assign(body, { tools, tool_choice: find("ask-choice").value });
	if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
	return body;
}

function send() {
	const box = find("ask-text"), text = box.value.trim();
	write(find("ask-error"), "");
	if (!text || answers.some((answer) => !answer.isOver)) return;
	keepAnswer();
	messages.push({ role: "user", content: text });
	if (ask()) {
		note("You", text);
		box.value = "";
	} else {
		messages.pop();
	}
}

/** Whether it was sent. */
function ask() {
	let body;
	try {
		body = asked();
	} catch (error) {
		write(find("ask-error"), error.message);
		return false;
	}
	const choice = find("ask-count").value;
	isComparing = choice === "same";
	const total = isComparing ? 2 : Number(choice);
	if (isComparing && body.seed === undefined) body.seed = crypto.getRandomValues(new Uint16Array(1))[0];
	const { seed } = body;
	write(find("difference"), "");
	answers = Array.from({ length: total }, (_, index) => {
		const own = seed === undefined || isComparing ? seed : seed + index;
		const title = isComparing ? `Run ${index + 1}, seed ${own}` : total === 1 ? "Answer" : `Answer ${index + 1}${own === undefined ? "" : `, seed ${own}`}`;
		return new Answer({ ...body, seed: own }, title);
	});
	find("answers").replaceChildren(...answers.map((answer) => answer.element));
	show(find("ask-stop-all"), total > 1);
	find("ask-send").disabled = true;
	return true;
}

function onEnd() {
	if (answers.some((answer) => !answer.isOver)) return;
	show(find("ask-stop-all"), false);
	find("ask-send").disabled = false;
	if (isComparing) write(find("difference"), markDifferences(answers.map((answer) => answer.output)));
	if (answers.length > 1 && !isComparing) for (const answer of answers) show(answer.goOn, true);
	askForResults();
	if (!answers.some((answer) => answer.request?.freed)) say("The response has ended");
}

/** Shows a tool call. The user types its result. */
function askForResults() {
	const [answer] = answers;
	const calls = answers.length === 1 ? answer.calls.filter(Boolean) : [];
	if (!calls.length) return;
	const boxes = calls.map((call) => el("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}`, placeholder: `What ${call.function.name} gives back` }));
	const send = el("button", { type: "button" }, "Send the result");
	send.addEventListener("click", () => {
		messages.push({ role: "assistant", content: answer.text || null, tool_calls: calls });
		note("Model", calls.map((call) => `${call.function.name}(${call.function.arguments})`).join("\n"));
		calls.forEach((call, index) => {
			messages.push({ role: "tool", tool_call_id: call.id, content: boxes[index].value });
			note("Tool", boxes[index].value);
		});
		answer.isKept = true;
		ask();
	});
	answer.element.append(el("div.results", {}, ...boxes, send));
}

/** Continues the chat after the first response. */
function keepAnswer(answer = answers[0]) {
	if (!answer || answer.isKept) return;
	answer.isKept = true;
	if (!answer.text) return;
	messages.push({ role: "assistant", content: answer.text });
	note("Model", answer.text);
	answers = [];
	find("answers").replaceChildren();
	write(find("difference"), "");
}

function goOn(answer) {
	keepAnswer(answer);
	find("ask-text").focus();
}

function note(who, text) {
	show(find("talk-none"), false);
	find("talk").append(el("li", {}, el("b", {}, who), el("div.text", {}, text)));
}

function stopAll() {
	for (const answer of answers) if (!answer.isOver) answer.stop();
}

function clear() {
	stopAll();
	[messages, answers] = [[], []];
	find("talk").replaceChildren();
	find("answers").replaceChildren();
	show(find("talk-none"), true);
	write(find("difference"), "");
	find("ask-send").disabled = false;
	find("ask-text").focus();
}

const inputs = Object.entries(NUMBERS).map(([name, title]) => el("label", {}, `${title} `, el("input", { id: `ask-${name}`, inputMode: "decimal" })));
find("numbers").prepend(...inputs);
find("ask-max_tokens").value = TOKENS_MAX;
on("ask", { submit: (event) => { event.preventDefault(); send(); } });
on("ask-text", { keydown: (event) => {
	if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
	event.preventDefault();
	find("ask").requestSubmit();
} });
on("ask-stop-all", { click: stopAll });
// A browser may keep a left page and its connections.
on(window, { pagehide: stopAll });
on("talk-clear", { click: clear });
for (const [name, example] of Object.entries({ tools: TOOLS, schema: SCHEMA })) {
	on(`${name}-example`, { click: () => { find(`ask-${name}`).value = JSON.stringify(example, null, 1); } });
}
