/** A router's endpoints, how streams move between them, and what a pair holds and sends. */

import { errorOf } from "./feed.js";
import { blocksOf, bytes, count, duration, el, figure, find, many, percent, say, show, write } from "./words.js";

const MOVES_MAX = 20;
const SIGNS = { healthy: "●", draining: "◐", ejected: "✕", probing: "◌", starting: "◌" };

class Card {
	constructor(name, ask) {
		this.health = el("span.health");
		this.bar = el("i");
		this.meter = el("div.meter", { "aria-hidden": "true" }, this.bar);
		this.facts = el("dl.facts");
		this.values = new Map();
		this.drain = el("button", { type: "button", onclick: () => ask(name), "aria-label": `Drain endpoint ${name}` }, "Drain");
		this.element = el("li.endpoint", {}, el("div.endpoint-head", {}, el("h3", {}, name), this.health, this.drain), this.meter, this.facts);
	}

	fact(label, text) {
		let value = this.values.get(label);
		if (!value) {
			value = el("dd");
			this.values.set(label, value);
			this.facts.append(el("div", {}, el("dt", {}, label), value));
		}
		write(value, text);
	}
}

export class Endpoints {
	#feed;
	#key;
	#cards = new Map();
	#places = new Map();
	#asked = null;

	constructor(feed, key) {
		[this.#feed, this.#key] = [feed, key];
		find("drain-form").addEventListener("submit", (event) => { event.preventDefault(); this.#drain(); });
		find("drain-no").addEventListener("click", () => find("drain-dialog").close());
		feed.addEventListener("snapshot", () => this.#places.clear());
	}

	update() {
		const { endpoints, queues, requests } = this.#feed.state;
		show(find("endpoints-panel"), endpoints != null);
		if (!endpoints) return;
		for (const [name, card] of this.#cards) {
			if (endpoints[name]) continue;
			card.element.remove();
			this.#cards.delete(name);
		}
		for (const [name, endpoint] of Object.entries(endpoints)) {
			let card = this.#cards.get(name);
			if (!card) {
				this.#cards.set(name, (card = new Card(name, (asked) => this.#ask(asked))));
				find("endpoints").append(card.element);
			}
			this.#write(card, endpoint);
		}
		const all = Object.values(endpoints), well = all.filter((endpoint) => endpoint.health === "healthy").length;
		write(find("endpoints-sum"), `${count(well)} of ${many(all.length, "endpoint")} healthy, ${count(queues?.waiting ?? 0)} in the queue${queues?.moving ? `, ${count(queues.moving)} moving` : ""}`);
		this.#noteMoves(requests);
	}

	#write(card, endpoint) {
		const { health, leases, leases_max: most, load } = endpoint;
		const since = endpoint.health_since_at ?? endpoint.since;
		write(card.health, `${SIGNS[health] ?? "○"} ${health}${since == null ? "" : ` for ${duration(Math.max(0, this.#feed.now() - since))}`}`);
		card.health.dataset.health = health;
		card.drain.disabled = health === "draining";
		const share = most ? Math.min(1, leases / most) : 0;
		card.bar.style.width = `${share * 100}%`;
		card.fact("Leases", `${count(leases)} of ${most == null ? "any" : count(most)}`);
		card.fact("In flight", count(endpoint.in_flight));
		card.fact("Waiting there", count(endpoint.waiting_depth));
		if (load) card.fact("Its own report", `${count(load.running)} running, ${count(load.waiting)} waiting, KV ${percent(load.kv_usage)}`);
		card.fact("Streams moved", `${count(endpoint.moved_from)} from here, ${count(endpoint.moved_to)} to here`);
		if (endpoint.ejections) card.fact("Ejections", count(endpoint.ejections));
		const models = endpoint.models ?? [];
		card.fact("Serves", `${models.join(", ") || "not known yet"}${endpoint.role ? ` (${endpoint.role})` : ""}`);
		if (endpoint.url) card.fact("Address", endpoint.url);
	}

	#noteMoves(requests) {
		const list = find("move-list");
		for (const [name, { id, endpoint, ended_at }] of Object.entries(requests)) {
			const before = this.#places.get(name);
			if (endpoint) this.#places.set(name, endpoint);
			if (!before || !endpoint || before === endpoint || ended_at != null) continue;
			list.prepend(el("li", {}, el("time", {}, new Date().toLocaleTimeString("en", { hour12: false })), ` ${id}: ${before} → ${endpoint}`));
			while (list.children.length > MOVES_MAX) list.lastChild.remove();
		}
		for (const name of this.#places.keys()) if (!requests[name]) this.#places.delete(name);
		show(find("moves"), list.children.length > 0);
	}

	#ask(name) {
		this.#asked = name;
		write(find("drain-title"), `Drain ${name}?`);
		find("drain-dialog").showModal();
	}

	async #drain() {
		const name = this.#asked, path = name.split("/").map(encodeURIComponent).join("/");
		find("drain-dialog").close();
		const query = find("drain-move").checked ? "?move=true" : "";
		try {
			const response = await fetch(`endpoints/${path}/drain${query}`, { method: "POST", headers: this.#key.headers() });
			const text = response.ok ? `${name} is being drained` : `${name}: ${await errorOf(response)}`;
			say(text);
			note(response.ok ? "" : text);
		} catch {
			note(`${name} could not be drained: no connection`);
		}
	}
}

export function note(text) {
	write(find("note"), text);
	show(find("note"), text !== "");
}

/** A number by its name: units stand at the end of it. */
function valued(name, value) {
	if (typeof value !== "number") return String(value);
	if (/bytes/.test(name)) return bytes(value);
	if (/seconds/.test(name)) return duration(value);
	return Number.isInteger(value) ? count(value) : figure(value);
}

function flat(object, before = "") {
	return Object.entries(object).flatMap(([name, value]) =>
		value !== null && typeof value === "object" ? flat(value, `${before}${name} `) : [[before + name, value]]);
}

export class Transfers {
	#feed;
	#values = new Map();
	constructor(feed) { this.#feed = feed; }

	update() {
		const { transfers, requests, stats } = this.#feed.state;
		const held = Object.values(requests).filter((request) => request.state === "held");
		show(find("transfers-panel"), transfers != null || held.length > 0);
		write(find("transfers-sum"), `${many(stats.blocks_held ?? 0, "block")} held`);
		const lines = held.slice(0, 20).map((request) => {
			const left = request.held_until == null ? "" : `, ${duration(Math.max(0, request.held_until - this.#feed.now()))} left at most`;
			return `${request.id}: ${many(blocksOf(request), "block")}${left}`;
		});
		const list = find("holds");
		while (list.children.length > lines.length) list.lastChild.remove();
		lines.forEach((line, index) => write(list.children[index] ?? list.appendChild(el("li")), line));
		for (const [name, value] of flat(transfers ?? {})) {
			if (value == null) continue;
			if (!this.#values.has(name)) {
				const shown = el("dd");
				const words = name.replace(/_(bytes|seconds|total)\b/g, "").replaceAll("_", " ");
				find("transfers").append(el("div", {}, el("dt", {}, words), shown));
				this.#values.set(name, shown);
			}
			write(this.#values.get(name), valued(name, value));
		}
	}
}
