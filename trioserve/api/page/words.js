/** Formats figures and creates elements. */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
	return value == null ? "–" : WHOLE.format(value);
}

/** A rate or a share, short: three figures. */
export function figure(value) {
	if (value == null) return "–";
	if (value >= 100) return WHOLE.format(value);
	return value >= 10 ? value.toFixed(1) : value.toFixed(value === 0 ? 0 : 2);
}

export function percent(share) {
	if (share == null) return "–";
	return share > 0 && share < 0.1 ? `${(share * 100).toFixed(1)} %` : `${Math.round(share * 100)} %`;
}

/** Seconds, in the unit that fits. */
export function duration(seconds) {
	if (seconds == null) return "–";
	if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
	if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
	if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
	seconds = Math.round(seconds);
	if (seconds < 60) return `${seconds} s`;
	if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`.replace(" 0 s", "");
	if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
	return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function bytes(value) {
	const units = ["B", "KiB", "MiB", "GiB", "TiB"];
	let unit = 0;
	while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
	return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const title = (name) => name[0].toUpperCase() + name.slice(1);

/** "1 block", "2 blocks" */
export function many(value, noun) {
	return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

const RATE_SECONDS = 2.5;

/** Growth rate of a count over the last seconds, or since its first value. */
export class Rate {
	#samples;
	constructor(now, total) { this.#samples = [[now, total]]; }

	of(now, total) {
		const samples = this.#samples;
		if (total < samples.at(-1)[1]) samples.length = 0;
		samples.push([now, total]);
		while (samples.length > 2 && now - samples[1][0] > RATE_SECONDS) samples.shift();
		const [[since, before]] = samples;
		return now > since ? (total - before) / (now - since) : 0;
	}
}

/** The outcome of a cancel as a sentence, or null if unknown. */
export function freed(request) {
	const { freed } = request;
	if (!freed) return null;
	return `${many(freed.blocks, "block")} free after ${many(freed.steps, "step")}, ${duration(freed.seconds)}`;
}

/** Number of a request's KV blocks. */
export function blocksOf(request) {
	return (request.blocks ?? []).reduce((sum, [, length]) => sum + length, 0);
}

export const find = (id) => document.getElementById(id);

/** on("map", { click: (event) => ... }): adds listeners to an element or to the element of an id. */
export function on(where, listeners) {
	const target = typeof where === "string" ? find(where) : where;
	for (const [name, listener] of Object.entries(listeners)) target.addEventListener(name, listener);
}

/** el("p.note", { hidden: true }, "text", child): an unknown property becomes an attribute. */
export function el(what, properties = {}, ...children) {
	const [tag, ...classes] = what.split(".");
	const made = document.createElement(tag);
	if (classes.length) made.className = classes.join(" ");
	for (const [name, value] of Object.entries(properties)) {
		if (name in made) made[name] = value;
		else made.setAttribute(name, value);
	}
	made.append(...children);
	return made;
}

/** A list of terms and values, in order of arrival. */
export class Terms {
	#values = new Map();
	constructor(list) { this.list = list; }

	has(term) { return this.#values.has(term); }

	/** mark: an element before the term. */
	set(term, text, mark = "") {
		if (!this.#values.has(term)) {
			const value = el("dd");
			this.#values.set(term, value);
			this.list.append(el("div", {}, el("dt", {}, mark, term), value));
		}
		write(this.#values.get(term), text);
	}
}

/** A square of a legend, beside its label. */
export const swatch = (kind, owner) => el(`i.swatch.${kind}`, { "aria-hidden": "true", style: ownColour(owner) });

/** Of everything that is one request's, or one part's of a step. */
export const ownColour = (owner) => (owner == null ? "" : `--own: var(--owner-${owner})`);

/** Writes only changed text, because each write costs a layout. */
export function write(element, text) {
	if (element.textContent !== text) element.textContent = text;
}

export function show(element, visible) {
	if (element.hidden === visible) element.hidden = !visible;
}

let saidLast = 0;
/** Announces a sentence to screen readers. */
export function say(text) {
	const mine = ++saidLast;
	find("said").textContent = "";
	requestAnimationFrame(() => {
		if (mine === saidLast) find("said").textContent = text;
	});
}

export const prefersStill = matchMedia("(prefers-reduced-motion: reduce)");
