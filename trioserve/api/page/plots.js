/** Lines over the last 15 minutes, and where a step's time goes. */

import { count, duration, el, figure, find, percent, show, write } from "./words.js";

const WIDTH = 300, HEIGHT = 110;
const SPANS = [24, 60, 180]; // points that are shown: as many as there are, and a few more
const SVG = "http://www.w3.org/2000/svg";
const PLOTS = [
	{ title: "Tokens/s", format: figure, lines: [["tokens_per_second", "tokens/s"]] },
	{ title: "First token", format: duration, lines: [["ttft_p50", "p50"], ["ttft_p95", "p95"]] },
	{ title: "Between tokens", format: duration, lines: [["itl_p50", "p50"], ["itl_p95", "p95"]] },
	{ title: "Requests/s", format: figure, lines: [["requests_per_second", "requests/s"]] },
	{ title: "Wait in the queue", format: duration, lines: [["queue_wait_p50", "p50"], ["queue_wait_p95", "p95"]] },
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
		this.when = el("span.when", {}, "now");
		const keys = spec.lines.map(([, name], index) => el("span.reading", {}, el(`i.dash.dash-${index}`, { "aria-hidden": "true" }), `${name} `, this.values[index]));
		this.element = el("figure", {}, el("figcaption", {}, el("span.title", {}, spec.title), el("span.readings", {}, ...keys)),
			el("div.canvas", {}, this.picture, this.topText), el("div.axis", { "aria-hidden": "true" }, (this.from = el("span")), this.when));
		this.picture.addEventListener("pointermove", (event) => {
			const box = this.picture.getBoundingClientRect();
			this.#read(Math.round(((event.clientX - box.left) / box.width) * (this.#points - 1)));
		});
		this.picture.addEventListener("pointerleave", () => this.#read(null));
		this.picture.addEventListener("blur", () => this.#read(null));
		this.picture.addEventListener("keydown", (event) => {
			const last = this.#points - 1, at = this.#at ?? last;
			const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
			if (to === undefined) return;
			event.preventDefault();
			this.#read(Math.max(0, Math.min(last, to)));
		});
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

export class Plots {
	#feed;
	#plots = PLOTS.map((spec) => new Plot(spec));
	#table = find("plot-table");

	constructor(feed) {
		this.#feed = feed;
		find("plots").append(...this.#plots.map((plot) => plot.element));
		this.#table.closest("details").addEventListener("toggle", () => this.#fill());
	}

	update() {
		const { history } = this.#feed.state;
		show(find("plots").parentElement, history != null);
		if (!history) return;
		write(find("plot-interval"), String(history.interval_seconds));
		for (const plot of this.#plots) {
			show(plot.element, plot.spec.lines.some(([name]) => name in history.series));
			plot.update(history);
		}
		this.#fill();
	}

	#fill() {
		const { history } = this.#feed.state ?? {};
		if (!history || !this.#table.closest("details").open) return;
		const lines = PLOTS.flatMap((plot) => plot.lines.map(([name, label]) => [name, `${plot.title}, ${label}`, plot.format])).filter(([name]) => name in history.series);
		const total = Math.max(...lines.map(([name]) => history.series[name]?.length ?? 0));
		const head = el("tr", {}, el("th", { scope: "col" }, "Ago"), ...lines.map(([, label]) => el("th", { scope: "col" }, label)));
		const rows = [];
		for (let back = 0; back < total; back += 12) {
			const ago = duration(back * history.interval_seconds);
			rows.push(el("tr", {}, el("th", { scope: "row" }, back ? ago : "now"),
				...lines.map(([name, , format]) => el("td", {}, format(history.series[name]?.at(-1 - back))))));
		}
		this.#table.replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
	}
}

const PARTS = [["schedule", "Schedule"], ["forward", "Forward"], ["update", "Update"], ["deliver", "Deliver"]];

export class Steps {
	#feed;
	#rows;
	constructor(feed) {
		this.#feed = feed;
		this.#rows = PARTS.map(([name, title]) => {
			const part = el(`i.${name}`), value = el("dd");
			find("steps-bar").append(part);
			find("steps").append(el("div", {}, el("dt", {}, el(`i.swatch.${name}`, { "aria-hidden": "true" }), title), value));
			return { part, value, field: `${name}_seconds` };
		});
	}

	update() {
		const { steps } = this.#feed.state;
		show(find("steps-panel"), steps != null);
		if (!steps) return;
		const sum = this.#rows.reduce((total, { field }) => total + (steps[field] ?? 0), 0);
		write(find("steps-sum"), steps.count ? `${duration(sum / steps.count)} a step, ${count(steps.count)} in the last second` : "no step in the last second");
		for (const { part, value, field } of this.#rows) {
			const share = sum ? steps[field] / sum : 0;
			part.style.flexGrow = share;
			write(value, steps.count ? `${duration(steps[field] / steps.count)} · ${percent(share)}` : "–");
		}
	}
}
