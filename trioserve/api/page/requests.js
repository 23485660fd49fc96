/** A row per request with its phases queue, prefill, decode and held, on an axis that ends now. */

import { key, pathOf } from "./asking.js";
import { owners } from "./blocks.js";
import { feed } from "./feed.js";
import { blocksOf, count, duration, el, figure, find, freed, many, on, ownColour, Rate, say, show, swatch, write } from "./words.js";

const ROWS_MAX = 30; // until one asks for all of them
const HEADS = ["Request", "State", "Life", "Tokens", "Tokens/s", "Age", "Deadline", "Blocks", "Action"];

class Row {
	constructor(name, colour) {
		this.name = name;
		const cell = (label, ...children) => el("td", { role: "cell", "data-head": label }, ...children);
		this.id = el("span.id");
		this.by = el("span.by");
		this.stateText = el("span");
		this.freed = el("span.freed");
		this.track = el("div.track", { "aria-hidden": "true" });
		this.segments = Object.fromEntries(["queue", "prefill", "decode", "held"].map((kind) => {
			const segment = el(`i.seg.${kind}`, { style: ownColour(colour) });
			this.track.append(segment);
			return [kind, segment];
		}));
		this.cancel = el("button.cancel", { type: "button", onclick: () => cancel(name) }, "Cancel");
		this.values = HEADS.slice(3, 8).map(() => el("span"));
		this.cached = el("span.by");
		const cells = HEADS.slice(3, 8).map((label, index) => cell(label, this.values[index], ...(index ? [] : [this.cached])));
		this.element = el("tr", { role: "row", tabIndex: -1 },
			el("th", { role: "rowheader", scope: "row" }, swatch("own", colour), this.id, this.by),
			cell("State", this.stateText, this.freed), cell("Life", this.track), ...cells, cell("Action", this.cancel));
		const here = () => point(name), gone = () => point(null);
		on(this.element, { pointerenter: here, pointerleave: gone, focusin: here, focusout: gone });
	}

	/** Tokens/s over the last seconds, or the average of an ended request. */
	#rate({ first_token_at: first, ended_at: ended, completion_tokens: tokens }, now) {
		if (first == null || tokens < 2) return null;
		this.rate ??= new Rate(first, 0);
		return ended == null ? this.rate.of(now, tokens) : ended > first ? tokens / (ended - first) : null;
	}

	write(request) {
		const { server } = feed.state;
		const now = feed.now(), isOver = request.ended_at != null;
		write(this.id, request.id);
		if (this.id.title !== request.id) this.id.title = request.id;
		const by = [request.tenant && `tenant ${request.tenant}`, request.endpoint && `at ${request.endpoint}`,
			request.choices > 1 && many(request.choices, "choice"), request.priority && `priority ${request.priority}`];
		write(this.by, by.filter(Boolean).join(" · "));
		write(this.stateText, stateOf(request, now));
		write(this.freed, freed(request) ?? "");
		this.element.classList.toggle("over", isOver && request.state !== "held");
		const left = request.deadline_at == null || isOver ? "–" : duration(Math.max(0, request.deadline_at - now));
		const rate = this.#rate(request, now);
		const values = [count(request.prompt_tokens) + (server.kind === "router" ? "" : ` + ${count(request.completion_tokens)}`), rate == null ? "–" : figure(rate),
			duration(Math.max(0, (request.ended_at ?? now) - request.entered_at)), left, server.block_count ? count(blocksOf(request)) : "–"];
		values.forEach((value, index) => write(this.values[index], value));
		write(this.cached, request.cached_tokens ? `${count(request.cached_tokens)} cached` : "");
		const isCancelling = cancelling.has(this.name);
		this.cancel.disabled = isOver || isCancelling;
		write(this.cancel, isOver ? outcomeOf(request) : isCancelling ? "Cancelling" : "Cancel");
		const label = `Cancel request ${request.id}`;
		if (this.cancel.getAttribute("aria-label") !== label && !isOver) this.cancel.setAttribute("aria-label", label);
		if (isOver && this.cancel.hasAttribute("aria-label")) this.cancel.removeAttribute("aria-label");
		if (request.freed && isCancelling && !told.has(this.name)) {
			told.add(this.name);
			say(`${request.id} is cancelled: ${freed(request)}`);
		}
	}
}

let onPoint;
const rows = new Map();
const table = find("request-rows");
let since = el("span");
let all = false;
let chosen = null;
const cancelling = new Set();
const told = new Set();

/** listener: called with the name of the request under the pointer, or null. */
export function whenPointed(listener) { onPoint = listener; }

function point(name) { onPoint(name ?? chosen); }

/** Scrolls to the row of a block's request. */
export function choose(name) {
	chosen = name;
	for (const [other, row] of rows) row.element.classList.toggle("chosen", other === name);
	onPoint(name);
	const row = rows.get(name);
	if (row) {
		row.element.scrollIntoView({ block: "nearest" });
		row.element.focus({ preventScroll: true });
	}
}

async function cancel(name) {
	const request = feed.state.requests[name];
	if (!request || cancelling.has(name)) return;
	cancelling.add(name);
	try {
		await key.ask(`v1/requests/${pathOf(request.id)}`, { method: "DELETE" });
	} catch ({ message }) {
		say(`${request.id} could not be cancelled: ${message}`);
		cancelling.delete(name);
	}
	update();
}

export function update() {
	const { requests, request_count } = feed.state;
	const names = Object.keys(requests);
	const isLive = (name) => requests[name].ended_at == null || requests[name].state === "held";
	const byEntry = (one, other) => requests[one].entered_at - requests[other].entered_at;
	const live = names.filter(isLive).sort(byEntry), ended = names.filter((name) => !isLive(name)).sort(byEntry).reverse();
	const wanted = [...live, ...ended], shown = all ? wanted : wanted.slice(0, ROWS_MAX);

	// A row under the pointer or with the focus stays, so that its button can be pressed.
	const isTouched = table.matches(":hover, :focus-within");
	const order = isTouched ? [...rows.keys(), ...shown.filter((name) => !rows.has(name))] : shown;
	const wantedNow = new Set(order);
	for (const [name, row] of rows) {
		if (wantedNow.has(name)) continue;
		row.element.remove();
		rows.delete(name);
	}
	order.forEach((name, index) => {
		let row = rows.get(name);
		if (!row) rows.set(name, (row = new Row(name, owners.colour(name))));
		if (table.children[index] !== row.element) table.insertBefore(row.element, table.children[index] ?? null);
		if (requests[name]) row.write(requests[name]);
		else row.cancel.disabled = true;
	});
	tell(request_count, live.length, wanted.length);
	move();
}

function tell(total, live, wanted) {
	const waiting = Object.values(feed.state.requests).filter((request) => request.running_at == null && request.ended_at == null).length;
	show(find("requests-none"), !wanted);
	show(find("requests"), wanted > 0);
	write(find("requests-sum"), live ? `${many(Math.max(total, live), "request")} live, ${count(waiting)} not yet running` : "");
	const more = find("requests-more");
	show(more, wanted > ROWS_MAX);
	write(more, all ? `Show ${ROWS_MAX} only` : `Show all ${count(wanted)}`);
}

/** Bars follow the clock. */
function move() {
	const { requests } = feed.state, seconds = Number(find("window").value), now = feed.now();
	write(since, seconds >= 60 ? `${seconds / 60} min ago` : `${seconds} s ago`);
	for (const [name, row] of rows) {
		const request = requests[name];
		if (!request) continue;
		const { entered_at: entered, ended_at: ended } = request;
		const running = (row.ranAt ??= request.running_at); // a stream that moves runs anew elsewhere
		const first = request.first_token_at ?? (request.phase === "decode" ? running : null);
		const end = ended ?? now;
		const isHeld = request.state === "held";
		const spans = {
			queue: [entered, running ?? end],
			prefill: [running, first ?? end],
			decode: [first, end],
			held: [isHeld ? ended ?? now : null, now],
		};
		for (const [kind, [from, to]] of Object.entries(spans)) {
			const style = row.segments[kind].style;
			const left = from == null ? 100 : Math.max(0, 100 - ((now - from) / seconds) * 100);
			const right = from == null ? 0 : Math.max(0, ((now - to) / seconds) * 100);
			const visible = from != null && to > from && left + right < 100;
			style.display = visible ? "" : "none";
			if (visible) [style.left, style.right] = [`${left}%`, `${right}%`];
		}
	}
}

const shown = { Life: [since, el("span.unseen", {}, " to "), el("span", {}, "now")], Action: [el("span.unseen", {}, "Action")] };
const heads = HEADS.map((name) => el(`th.${name.toLowerCase()}`, { scope: "col", role: "columnheader" }, ...(shown[name] ?? [name])));
find("request-heads").append(...heads);
on("requests-more", { click: () => { all = !all; update(); } });
on("window", { change: () => move() });
setInterval(() => { if (feed.state && !document.hidden) move(); }, 100);

function stateOf(request, now) {
	if (request.state === "held") {
		return request.held_until == null ? "held" : `held, ${duration(Math.max(0, request.held_until - now))} at most`;
	}
	if (request.ended_at != null) return outcomeOf(request);
	if (request.state === "running") return request.phase;
	return request.state;
}

function outcomeOf(request) {
	return (request.outcome ?? "ended").replaceAll("_", " ");
}
