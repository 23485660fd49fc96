/** How figures read, and how elements are made. */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {number|null|undefined} value */
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

/** "1 block", "2 blocks" */
export function many(value, noun) {
	return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** What a cancel brought back, as a sentence; null while it is not known. */
export function freed(request) {
	const { freed } = request;
	if (!freed) return null;
	return `${many(freed.blocks, "block")} free after ${many(freed.steps, "step")}, ${duration(freed.seconds)}`;
}

/** How many KV blocks a request has. */
export function blocksOf(request) {
	return (request.blocks ?? []).reduce((sum, [, length]) => sum + length, 0);
}

export const find = (id) => document.getElementById(id);

/** el("p.note", { hidden: true }, "text", child): what is no property of elements is an attribute. */
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

/** Writes only what differs: a page that changes four times a second should not lay out what stays. */
export function write(element, text) {
	if (element.textContent !== text) element.textContent = text;
}

export function show(element, visible) {
	if (element.hidden === visible) element.hidden = !visible;
}

let saidLast = 0;
/** Told to screen readers, one sentence at a time. */
export function say(text) {
	const mine = ++saidLast;
	find("said").textContent = "";
	requestAnimationFrame(() => {
		if (mine === saidLast) find("said").textContent = text;
	});
}

export const prefersStill = matchMedia("(prefers-reduced-motion: reduce)");
