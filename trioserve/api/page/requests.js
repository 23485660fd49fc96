/** The life of requests, a row each: queue, prefill, decode, held, on an axis that ends now. */

import { errorOf } from "./feed.js";
import { blocksOf, count, duration, el, figure, find, freed, many, say, show, write } from "./words.js";

const ROWS_MAX = 30; // until one asks for all of them
const RATE_SECONDS = 2.5; // over which tokens/s are taken
const HEADS = ["Request", "State", "Life", "Tokens", "Tokens/s", "Age", "Deadline", "Blocks", ""];

/** Tokens/s over the last few seconds; on the average once it has ended. */
class Rate {
	#samples = [];
	of(request, now) {
		if (request.first_token_at == null || request.completion_tokens < 2) return null;
		if (request.ended_at != null) {
			const seconds = request.ended_at - request.first_token_at;
			return seconds > 0 ? request.completion_tokens / seconds : null;
		}
		const samples = this.#samples;
		samples.push([now, request.completion_tokens]);
		while (samples.length > 2 && now - samples[1][0] > RATE_SECONDS) samples.shift();
		const [since, before] = samples[0];
		const base = now - since > 0.5 ? [since, before] : [request.first_token_at, 0];
		return now > base[0] ? (request.completion_tokens - base[1]) / (now - base[0]) : null;
	}
}

class Row {
	rate = new Rate();
	constructor(name, colour, list) {
		this.name = name;
		const cell = (label, ...children) => el("td", { role: "cell", "data-head": label }, ...children);
		this.id = el("span.id");
		this.by = el("span.by");
		this.stateText = el("span");
		this.freed = el("span.freed");
		this.track = el("div.track", { "aria-hidden": "true" });
		this.segments = Object.fromEntries(["queue", "prefill", "decode", "held"].map((kind) => {
			const segment = el(`i.seg.${kind}.c${colour}`);
			this.track.append(segment);
			return [kind, segment];
		}));
		this.cancel = el("button.cancel", { type: "button", onclick: () => list.cancel(name) }, "Cancel");
		const swatch = el(`i.swatch.c${colour}`, { "aria-hidden": "true" });
		this.values = HEADS.slice(3, 8).map(() => el("span"));
		this.cached = el("span.by");
		const cells = HEADS.slice(3, 8).map((label, index) => cell(label, this.values[index], ...(index ? [] : [this.cached])));
		this.element = el("tr", { role: "row", tabIndex: -1 },
			el("th", { role: "rowheader", scope: "row" }, swatch, this.id, this.by),
			cell("State", this.stateText, this.freed), cell("Life", this.track), ...cells, cell("Action", this.cancel));
		this.element.addEventListener("pointerenter", () => list.point(name));
		this.element.addEventListener("pointerleave", () => list.point(null));
		this.element.addEventListener("focusin", () => list.point(name));
		this.element.addEventListener("focusout", () => list.point(null));
	}
}

export class RequestList {
	#feed;
	#owners;
	#key;
	#onPoint;
	#rows = new Map();
	#body = find("request-rows");
	#all = false;
	#chosen = null;
	#cancelling = new Set();
	#told = new Set();

	/** onPoint: called with the name of the request that is pointed at, or null. */
	constructor(feed, owners, key, onPoint) {
		[this.#feed, this.#owners, this.#key, this.#onPoint] = [feed, owners, key, onPoint];
		find("requests-more").addEventListener("click", () => { this.#all = !this.#all; this.update(); });
		find("window").addEventListener("change", () => this.#move());
		const move = () => { if (this.#feed.state && !document.hidden) this.#move(); };
		setInterval(move, 100);
	}

	get #seconds() { return Number(find("window").value); }

	point(name) { this.#onPoint(name ?? this.#chosen); }

	/** From the map: the row comes into view. */
	choose(name) {
		this.#chosen = name;
		for (const [other, row] of this.#rows) row.element.classList.toggle("chosen", other === name);
		this.#onPoint(name);
		const row = this.#rows.get(name);
		if (row) {
			row.element.scrollIntoView({ block: "nearest" });
			row.element.focus({ preventScroll: true });
		}
	}

	async cancel(name) {
		const request = this.#feed.state.requests[name];
		if (!request || this.#cancelling.has(name)) return;
		this.#cancelling.add(name);
		try {
			const path = request.id.split("/").map(encodeURIComponent).join("/");
			const response = await fetch(`v1/requests/${path}`, { method: "DELETE", headers: this.#key.headers() });
			if (!response.ok) say(`${request.id}: ${await errorOf(response)}`);
		} catch {
			say(`${request.id} could not be cancelled: no connection`);
			this.#cancelling.delete(name);
		}
		this.update();
	}

	update() {
		const { requests, request_count } = this.#feed.state;
		const names = Object.keys(requests);
		const isLive = (name) => requests[name].ended_at == null || requests[name].state === "held";
		const byEntry = (one, other) => requests[one].entered_at - requests[other].entered_at;
		const live = names.filter(isLive).sort(byEntry), ended = names.filter((name) => !isLive(name)).sort(byEntry).reverse();
		const wanted = [...live, ...ended], shown = this.#all ? wanted : wanted.slice(0, ROWS_MAX);

		// A row under the pointer or with the focus does not move: its button is about to be pressed.
		const isTouched = this.#body.matches(":hover, :focus-within");
		const kept = isTouched ? [...this.#rows.keys()].filter((name) => requests[name] || !this.#rows.get(name).isGone) : [];
		const order = isTouched ? [...kept, ...shown.filter((name) => !this.#rows.has(name))] : shown;
		const wantedNow = new Set(order);
		for (const [name, row] of this.#rows) {
			if (wantedNow.has(name)) continue;
			row.element.remove();
			this.#rows.delete(name);
		}
		order.forEach((name, index) => {
			let row = this.#rows.get(name);
			if (!row) this.#rows.set(name, (row = new Row(name, this.#owners.colour(name), this)));
			if (this.#body.children[index] !== row.element) this.#body.insertBefore(row.element, this.#body.children[index] ?? null);
			if (requests[name]) this.#write(row, requests[name]);
			else row.cancel.disabled = true;
		});
		this.#tell(names, request_count, live.length, wanted.length);
		this.#move();
	}

	#tell(names, total, live, wanted) {
		const waiting = names.filter((name) => this.#feed.state.requests[name].running_at == null && this.#feed.state.requests[name].ended_at == null).length;
		show(find("requests-none"), !wanted);
		show(find("requests"), wanted > 0);
		write(find("requests-sum"), live ? `${many(Math.max(total, live), "request")} live, ${count(waiting)} not yet running` : "");
		const more = find("requests-more");
		show(more, wanted > ROWS_MAX);
		write(more, this.#all ? `Show ${ROWS_MAX} only` : `Show all ${count(wanted)}`);
	}

	#write(row, request) {
		const { server } = this.#feed.state;
		const now = this.#feed.now(), isOver = request.ended_at != null;
		write(row.id, request.id);
		if (row.id.title !== request.id) row.id.title = request.id;
		const by = [request.tenant && `tenant ${request.tenant}`, request.endpoint && `at ${request.endpoint}`,
			request.choices > 1 && many(request.choices, "choice"), request.priority && `priority ${request.priority}`];
		write(row.by, by.filter(Boolean).join(" · "));
		write(row.stateText, stateOf(request, now));
		write(row.freed, freed(request) ?? "");
		row.element.classList.toggle("over", isOver && request.state !== "held");
		const left = request.deadline_at == null || isOver ? "–" : duration(Math.max(0, request.deadline_at - now));
		const rate = row.rate.of(request, now);
		const values = [count(request.prompt_tokens) + (server.kind === "router" ? "" : ` + ${count(request.completion_tokens)}`), rate == null ? "–" : figure(rate),
			duration(Math.max(0, (request.ended_at ?? now) - request.entered_at)), left, server.block_count ? count(blocksOf(request)) : "–"];
		values.forEach((value, index) => write(row.values[index], value));
		write(row.cached, request.cached_tokens ? `${count(request.cached_tokens)} cached` : "");
		const isCancelling = this.#cancelling.has(row.name);
		row.cancel.disabled = isOver || isCancelling;
		write(row.cancel, isOver ? outcomeOf(request) : isCancelling ? "Cancelling" : "Cancel");
		const label = `Cancel request ${request.id}`;
		if (row.cancel.getAttribute("aria-label") !== label && !isOver) row.cancel.setAttribute("aria-label", label);
		if (isOver && row.cancel.hasAttribute("aria-label")) row.cancel.removeAttribute("aria-label");
		if (request.freed && isCancelling && !this.#told.has(row.name)) {
			this.#told.add(row.name);
			say(`${request.id} is cancelled: ${freed(request)}`);
		}
	}

	/** Bars follow the clock. */
	#move() {
		const { requests } = this.#feed.state, seconds = this.#seconds, now = this.#feed.now();
		write(find("window-from"), seconds >= 60 ? `${seconds / 60} min ago` : `${seconds} s ago`);
		for (const [name, row] of this.#rows) {
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
}

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
