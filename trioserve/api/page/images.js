/** Pictures: asked for, seen as they become, cancelled; and the requests of everybody. */

import { errorOf, eventsOf, key, pathOf } from "./asking.js";
import { showKey, showStatus, whenKeyIsSet, whenThemeChanges } from "./frame.js";
import { count, duration, el, find, many, on, say, show, write } from "./words.js";

const LOOK_SECONDS = 1; // between two looks at the requests
const SMALL_PIXELS = 128; // a side; pictures up to this are shown as their pixels are
const SETS_MAX = 30; // that are kept on the page

let model = null; // as /v1/models has it
const live = new Set(); // what was asked for, until it ends

// --- one request ---

/** One picture of a request, from its first step to its end. */
class Shot {
	constructor(index, shape, prompt) {
		this.prompt = prompt;
		this.blank = el("div.blank");
		this.blank.style.setProperty("--shape", shape);
		this.image = el("img", { alt: `${prompt}, picture ${index + 1}`, hidden: true });
		this.bar = el("progress", { max: 1, value: 0, "aria-label": `Picture ${index + 1}` });
		this.text = el("span", {}, "waits");
		this.keep = el("a", { hidden: true, download: "" }, "Save");
		this.element = el("figure.shot", {}, this.blank, this.image, this.bar, el("figcaption", {}, this.text, this.keep));
	}

	/** seed: as it was written, since JavaScript's numbers have fewer digits. */
	take(event, seed) {
		const { steps_done: done, step_count: total, size, b64_json: file, output_format: format } = event;
		const isWhole = event.type.endsWith(".completed");
		[this.bar.max, this.bar.value] = [total, done];
		write(this.text, isWhole ? `seed ${seed} · ${size} · ${many(done, "step")}` : `step ${count(done)} of ${count(total)}`);
		if (!file) return;
		const url = `data:image/${format};base64,${file}`;
		this.image.src = url;
		this.image.classList.toggle("unfinished", !isWhole);
		this.image.classList.toggle("small", Math.max(...size.split("x")) <= SMALL_PIXELS);
		show(this.image, true);
		show(this.blank, false);
		if (!isWhole) return;
		this.isWhole = true;
		show(this.bar, false);
		show(this.keep, true);
		this.keep.href = url;
		this.keep.download = `${this.prompt.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}-${seed}.${format}`;
	}

	end(text) {
		if (this.isWhole) return;
		write(this.text, text);
		show(this.bar, false);
	}
}

/** What was asked for at once: its pictures, and the button that ends it. */
class Asked {
	#abort = new AbortController();
	#isStopped = false;

	constructor({ path, body, headers }, { prompt, total, shape }) {
		this.id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
		this.prompt = prompt;
		this.stopButton = el("button", { type: "button", onclick: () => this.stop(), "aria-label": `Cancel ${prompt}` }, "Cancel");
		this.figures = el("p.aside");
		this.shots = Array.from({ length: total }, (_, index) => new Shot(index, shape, prompt));
		this.element = el("article.set", { "aria-label": prompt, "aria-busy": "true" },
			el("header", {}, el("h3", {}, prompt), this.figures, this.stopButton),
			el("div.shots", {}, ...this.shots.map((shot) => shot.element)));
		this.run(path, body, headers);
	}

	stop() {
		this.#isStopped = true;
		this.#abort.abort();
	}

	async run(path, body, headers) {
		const began = performance.now();
		live.add(this);
		try {
			const response = await key.ask(path, { method: "POST", headers: { ...headers, "X-Request-Id": this.id }, body, signal: this.#abort.signal });
			for await (const events of eventsOf(response)) {
				for (const [, data] of events) this.#take(JSON.parse(data), /"seed":(\d+)/.exec(data)?.[1]);
			}
			if (this.shots.every((shot) => shot.isWhole)) say(`${this.prompt}: done`);
			else this.#fail("the response broke off");
		} catch ({ message }) {
			if (!this.#isStopped) this.#fail(message);
		}
		live.delete(this);
		for (const shot of this.shots) shot.end(this.#isStopped ? "cancelled" : "not made");
		if (this.#isStopped) say(`${this.prompt}: cancelled`);
		write(this.figures, `${this.#isStopped ? "cancelled after " : ""}${duration((performance.now() - began) / 1000)}`);
		this.element.setAttribute("aria-busy", "false");
		show(this.stopButton, false);
		look();
	}

	#take(event, seed) {
		if (event.error) throw new Error(event.error.message ?? "the response broke off");
		this.shots[event.index]?.take(event, seed);
	}

	#fail(message) {
		this.element.append(el("p.error", { role: "alert" }, message));
	}
}

// --- asking ---

function number(name) {
	const input = find(`ask-${name}`), text = input.value.trim();
	if (!text || input.closest("label").hidden) return undefined;
	const value = Number(text);
	if (name === "seed" ? /^-?\d+$/.test(text) : Number.isFinite(value)) return name === "seed" ? String(BigInt(text)) : value;
	input.focus();
	throw new Error(`"${text}" is no number (${name})`);
}

/** The fields of a request, and what there is to be seen of it meanwhile. */
function wanted() {
	const takes = model.image, prompt = takes.classes ? find("ask-class").value : find("ask-prompt").value.trim();
	if (!prompt) throw new Error("Say what is to be seen.");
	const [width, height] = takes.size.split("x").map(Number), total = number("n") ?? 1;
	const fields = { model: model.id, prompt, n: total, stream: true, steps: number("steps"), guidance: number("guidance"), seed: number("seed"),
		partial_images: number("partials"), sampler: find("ask-sampler").value || undefined, negative_prompt: find("ask-negative").value.trim() || undefined };
	const sides = [number("width"), number("height")];
	const isSized = sides.some((side) => side !== undefined), image = takes.takes_images ? find("ask-image").files[0] : undefined;
	const [wide, high] = [sides[0] ?? width, sides[1] ?? height];
	if (isSized) fields.size = `${wide}x${high}`;
	const seen = { prompt, total: Math.max(1, Math.min(total, takes.n_max)), shape: `${wide} / ${high}` };
	if (image) return [formOf(fields, image), seen];
	// A seed may have more digits than JavaScript's numbers.
	const seed = fields.seed === undefined ? "" : `,"seed":${fields.seed}`;
	const rest = JSON.stringify({ ...fields, seed: undefined, stream_options: { include_progress: true } });
	return [{ path: "v1/images/generations", body: rest.slice(0, -1) + seed + "}", headers: { "Content-Type": "application/json" } }, seen];
}

function formOf(fields, image) {
	const form = new FormData(), mask = find("ask-mask").files[0];
	const all = { ...fields, strength: number("strength"), "stream_options[include_progress]": true };
	for (const [name, value] of Object.entries(all)) if (value !== undefined) form.append(name, value);
	form.append("image", image);
	if (mask) form.append("mask", mask);
	return { path: "v1/images/edits", body: form, headers: {} };
}

function send() {
	write(find("ask-error"), "");
	try {
		if (!model) throw new Error("The server has not said yet what it makes.");
		const set = new Asked(...wanted());
		const sets = find("pictures");
		sets.prepend(set.element);
		while (sets.children.length > SETS_MAX && sets.lastElementChild.ariaBusy === "false") sets.lastElementChild.remove();
		show(find("pictures-none"), false);
		look();
	} catch ({ message }) {
		write(find("ask-error"), message);
	}
}

// --- the model ---

async function readModel() {
	const { data } = await (await key.ask("v1/models")).json();
	model = data[0];
	const { image: takes } = model;
	write(find("model"), model.id);
	document.title = `${model.id} · trioserve`;
	find("ask-class").replaceChildren(...(takes.classes ?? []).map((name) => el("option", {}, name)));
	find("ask-sampler").replaceChildren(...takes.samplers.map((name) => el("option", {}, name)));
	show(find("prompt-label"), !takes.classes);
	show(find("class-label"), Boolean(takes.classes));
	show(find("negative-label"), takes.takes_negative_prompt && !takes.classes);
	show(find("guidance-label"), takes.takes_guidance);
	show(find("sampler-label"), takes.samplers.length > 1);
	for (const side of ["width", "height"]) show(find(`${side}-label`), takes.side_min !== takes.side_max);
	show(find("edit"), takes.takes_images);
	const [width, height] = takes.size.split("x");
	for (const [name, value] of Object.entries({ width, height, steps: takes.steps, guidance: takes.guidance })) find(`ask-${name}`).placeholder = value;
	write(find("takes"), `${takes.size}, ${takes.steps} steps unless you say otherwise; at most ${many(takes.n_max, "picture")} at once, ${count(takes.steps_max)} steps`);
	const { version } = await (await key.ask("version")).json();
	write(find("about"), `trioserve ${version} · ${model.family} · ${model.root}`);
}

// --- everybody's requests ---

class Row {
	constructor(id) {
		this.state = el("span");
		this.bar = el("progress", { "aria-label": `Steps of ${id}` });
		this.button = el("button.cancel", { type: "button", "aria-label": `Cancel request ${id}`, onclick: () => this.cancel(id) }, "Cancel");
		this.element = el("li", {}, el("span.id", {}, id), this.state, this.bar, this.button);
	}

	async cancel(id) {
		this.button.disabled = true;
		try {
			await key.ask(`v1/requests/${pathOf(id)}`, { method: "DELETE" });
			say(`${id} is cancelled`);
		} catch ({ message }) {
			say(`${id} could not be cancelled: ${message}`);
			this.button.disabled = false;
		}
		look();
	}

	write({ state, phase, steps_done: done, step_count: total, age_seconds: age, pictures }) {
		write(this.state, `${state === "running" ? phase : state} · ${many(pictures, "picture")} · ${duration(age)}`);
		[this.bar.max, this.bar.value] = [Math.max(1, total), done];
	}
}

const rows = new Map();

function showRequests(requests) {
	const ids = new Map(requests.map((request) => [request.id, request]));
	for (const [id, row] of rows) {
		if (ids.has(id)) continue;
		row.element.remove();
		rows.delete(id);
	}
	for (const [id, request] of ids) {
		if (!rows.has(id)) {
			rows.set(id, new Row(id));
			find("requests").append(rows.get(id).element);
		}
		rows.get(id).write(request);
	}
	const waiting = requests.filter(({ state }) => state === "waiting").length;
	show(find("requests-none"), !requests.length);
	write(find("requests-sum"), requests.length ? `${many(requests.length, "request")} live, ${count(waiting)} not yet running` : "");
}

let isLooking = false;

/** One look at a time; the next comes by itself. */
async function look() {
	if (isLooking) return;
	isLooking = true;
	try {
		const response = await key.fetch("v1/requests", { cache: "no-store" });
		if (response.status === 401 || response.status === 403) {
			showStatus("key", "An API key is needed");
			if (!find("key-dialog").open) showKey(await errorOf(response));
			return;
		}
		if (!response.ok) throw new Error(await errorOf(response));
		showRequests((await response.json()).data);
		if (!model) await readModel();
		showStatus("live", "Live");
		showKey(null);
	} catch {
		showStatus("lost", "Connection lost, trying again");
	} finally {
		isLooking = false;
	}
}

on("ask", { submit: (event) => { event.preventDefault(); send(); } });
on("ask-prompt", { keydown: (event) => {
	if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
	event.preventDefault();
	find("ask").requestSubmit();
} });
// A browser may keep a page that was left, and its connections, for who comes back.
on(window, { pagehide: () => live.forEach((asked) => asked.stop()), error: (event) => say(`The page itself failed: ${event.message}`) });
on(document, { visibilitychange: () => document.hidden || look() });
whenKeyIsSet(look);
whenThemeChanges(() => {});
setInterval(() => { if (!document.hidden) look(); }, LOOK_SECONDS * 1000);
look();
