/** Lines over the last 15 minutes, and where a step's time goes. */

import { feed } from "./feed.js";
import { count, duration, el, figure, find, on, ownColour, percent, show, swatch, Terms, title, write } from "./words.js";

const WIDTH = 300, HEIGHT = 110;
const SPANS = [24, 60, 180]; // points that are shown: as many as there are, and a few more
const SVG = "http://www.w3.org/2000/svg";
const shares = (name) => [[`${name}_p50`, "p50"], [`${name}_p95`, "p95"]];
const PLOTS = [
	{ title: "Tokens/s", format: figure, lines: [["tokens_per_second", "tokens/s"]] },
	{ title: "First token", format: duration, lines: shares("ttft") },
	{ title: "Between tokens", format: duration, lines: shares("itl") },
	{ title: "Requests/s", format: figure, lines: [["requests_per_second", "requests/s"]] },
	{ title: "Wait in the queue", format: duration, lines: shares("queue_wait") },
	{ title: "Requests", format: count, lines: [["running", "running"], ["queue", "waiting"]] },
	{ title: "KV usage", format: percent, top: 1, lines: [["kv_usage", "in use"]] },
];

function svg(name, attributes, ...children) {
	const made = document.createElementNS(SVG, name);
	for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
	made.append(...children);
	return made;
}

/** A round number that is not smaller. */
function roundUp(value) {
	const power = 10 ** Math.floor(Math.log10(value));
	return [1, 2, 5, 10].map((factor) => factor * power).find((top) => top >= value * 0.9999);
}

class Plot {
	#at = null;
	#series = {};
	#top = 1;
	#interval = 5;
	#points = SPANS[0];

	constructor(spec) {
		this.spec = spec;
		this.values = spec.lines.map(() => el("b"));
		this.paths = spec.lines.map((_, index) => svg("path", { class: `line line-${index}` }));
		this.cross = svg("line", { class: "cross", y1: 0, y2: HEIGHT, visibility: "hidden" });
		this.topText = el("span.top-value", { "aria-hidden": "true" });
		this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: 0 },
			...[0.25, 0.5, 0.75].map((share) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share })),
			...this.paths, this.cross);
		this.when = el("span");
		const keys = spec.lines.map(([, name], index) => el("span", {}, el(`i.dash.dash-${index}`, { "aria-hidden": "true" }), `${name} `, this.values[index]));
		this.element = el("figure", {}, el("figcaption", {}, el("span.title", {}, spec.title), el("span.readings", {}, ...keys)),
			el("div.canvas", {}, this.picture, this.topText), el("div.axis", { "aria-hidden": "true" }, (this.from = el("span")), this.when));
		on(this.picture, {
			pointermove: (event) => {
				const box = this.picture.getBoundingClientRect();
				this.#read(Math.round(((event.clientX - box.left) / box.width) * (this.#points - 1)));
			},
			pointerleave: () => this.#read(null),
			blur: () => this.#read(null),
			keydown: (event) => this.#onKey(event),
		});
	}

	#onKey(event) {
		const last = this.#points - 1, at = this.#at ?? last;
		const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
		if (to === undefined) return;
		event.preventDefault();
		this.#read(Math.max(0, Math.min(last, to)));
	}

	update(history) {
		this.#interval = history.interval_seconds;
		this.#series = {};
		const total = Math.max(...Object.values(history.series).map((points) => points.length));
		this.#points = SPANS.find((span) => span >= total) ?? SPANS.at(-1);
		write(this.from, `${duration(this.#points * this.#interval)} ago`);
		let highest = 0;
		for (const [name] of this.spec.lines) {
			const points = history.series[name] ?? [];
			this.#series[name] = [...new Array(Math.max(0, this.#points - points.length)).fill(null), ...points.slice(-this.#points)];
			for (const value of points) if (value > highest) highest = value;
		}
		this.#top = this.spec.top ?? (highest > 0 ? roundUp(highest * 1.05) : 1);
		this.spec.lines.forEach(([name], index) => this.paths[index].setAttribute("d", this.#line(this.#series[name])));
		write(this.topText, highest > 0 ? this.spec.format(this.#top) : "");
		this.#read(this.#at);
	}

	#line(points) {
		let path = "", isOpen = false;
		points.forEach((value, index) => {
			if (value == null) return void (isOpen = false);
			const x = (index / (this.#points - 1)) * WIDTH, y = HEIGHT - 1.5 - (Math.min(value, this.#top) / this.#top) * (HEIGHT - 4);
			const isLone = !isOpen && points[index + 1] == null;
			path += `${isOpen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${isLone ? "h1" : ""}`;
			isOpen = true;
		});
		return path;
	}

	/** index: of the point that is read; null: the last one. */
	#read(index) {
		this.#at = index;
		const last = this.#points - 1, at = Math.min(index ?? last, last);
		const texts = this.spec.lines.map(([name]) => this.spec.format(this.#series[name]?.[at]));
		texts.forEach((text, line) => write(this.values[line], text));
		const when = at === last ? "now" : `${duration((last - at) * this.#interval)} ago`;
		write(this.when, when);
		const x = (at / last) * WIDTH;
		for (const name of ["x1", "x2"]) this.cross.setAttribute(name, x);
		this.cross.setAttribute("visibility", index === null ? "hidden" : "visible");
		const said = this.spec.lines.map(([, name], line) => `${name} ${texts[line]}`).join(", ");
		this.picture.setAttribute("aria-label", `${this.spec.title}, ${when}: ${said}`);
	}
}

const plots = PLOTS.map((spec) => new Plot(spec));
const table = find("plot-table");

export function updatePlots() {
	const { history } = feed.state;
	show(find("plots").parentElement, history != null);
	if (!history) return;
	write(find("plot-interval"), String(history.interval_seconds));
	for (const plot of plots) {
		show(plot.element, plot.spec.lines.some(([name]) => name in history.series));
		plot.update(history);
	}
	fill();
}

function fill() {
	const { history } = feed.state ?? {};
	if (!history || !table.closest("details").open) return;
	const lines = PLOTS.flatMap((plot) => plot.lines.map(([name, label]) => [name, `${plot.title}, ${label}`, plot.format])).filter(([name]) => name in history.series);
	const total = Math.max(...lines.map(([name]) => history.series[name]?.length ?? 0));
	const head = el("tr", {}, el("th", { scope: "col" }, "Ago"), ...lines.map(([, label]) => el("th", { scope: "col" }, label)));
	const rows = [];
	for (let back = 0; back < total; back += 12) {
		const ago = duration(back * history.interval_seconds);
		rows.push(el("tr", {}, el("th", { scope: "row" }, back ? ago : "now"),
			...lines.map(([name, , format]) => el("td", {}, format(history.series[name]?.at(-1 - back))))));
	}
	table.replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}

find("plots").append(...plots.map((plot) => plot.element));
on(table.closest("details"), { toggle: fill });

const PARTS = { schedule: 4, forward: 0, update: 2, deliver: 3 }; // and their colours

const parts = new Terms(find("steps"));
const bars = Object.entries(PARTS).map(([name, colour]) => el(`i.${name}`, { style: ownColour(colour) }));
find("steps-bar").append(...bars);

export function updateSteps() {
	const { steps } = feed.state;
	show(find("steps-panel"), steps != null);
	if (!steps) return;
	const times = Object.keys(PARTS).map((name) => steps[`${name}_seconds`]), sum = times.reduce((one, other) => one + other);
	write(find("steps-sum"), steps.count ? `${duration(sum / steps.count)} a step, ${count(steps.count)} in the last second` : "no step in the last second");
	Object.entries(PARTS).forEach(([name, colour], index) => {
		const share = sum ? times[index] / sum : 0;
		bars[index].style.flexGrow = share;
		parts.set(title(name), steps.count ? `${duration(times[index] / steps.count)} · ${percent(share)}` : "–", swatch(name, colour));
	});
}
