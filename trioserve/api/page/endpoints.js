/** A router's endpoints, moves of streams, and the KV transfers of pairs. */

import { key, pathOf } from "./asking.js";
import { feed } from "./feed.js";
import { blocksOf, bytes, count, duration, el, figure, find, many, on, percent, say, show, Terms, title, write } from "./words.js";

const MOVES_MAX = 20;
const SIGNS = { healthy: "●", draining: "◐", ejected: "✕", probing: "◌", starting: "◌" };

class Card {
	constructor(name) {
		this.health = el("span.health");
		this.bar = el("i");
		this.meter = el("div.meter", { "aria-hidden": "true" }, this.bar);
		this.facts = new Terms(el("dl.facts"));
		this.drain = el("button", { type: "button", onclick: () => ask(name), "aria-label": `Drain endpoint ${name}` }, "Drain");
		this.element = el("li.endpoint", {}, el("div.endpoint-head", {}, el("h3", {}, name), this.health, this.drain), this.meter, this.facts.list);
	}

	show(endpoint) {
		const { facts } = this, { health, health_since_at: since, leases, leases_max: most, load } = endpoint;
		write(this.health, `${SIGNS[health] ?? "○"} ${health}${since == null ? "" : ` for ${duration(Math.max(0, feed.now() - since))}`}`);
		this.health.dataset.health = health;
		this.drain.disabled = health === "draining";
		const share = most ? Math.min(1, leases / most) : 0;
		this.bar.style.width = `${share * 100}%`;
		facts.set("Leases", `${count(leases)} of ${most == null ? "any" : count(most)}`);
		facts.set("In flight", count(endpoint.in_flight));
		facts.set("Waiting there", count(endpoint.waiting_depth));
		if (load) facts.set("Its own report", `${count(load.running)} running, ${count(load.waiting)} waiting, KV ${percent(load.kv_usage)}`);
		facts.set("Streams moved", `${count(endpoint.moved_from)} from here, ${count(endpoint.moved_to)} to here`);
		if (endpoint.ejections) facts.set("Ejections", count(endpoint.ejections));
		const models = endpoint.models ?? [];
		facts.set("Serves", `${models.join(", ") || "not known yet"}${endpoint.role ? ` (${endpoint.role})` : ""}`);
		if (endpoint.url) facts.set("Address", endpoint.url);
	}
}

class ModelCard {
	constructor(name) {
		this.health = el("span.health");
		this.facts = new Terms(el("dl.facts"));
		this.act = el("button", { type: "button", onclick: () => change(name, this.action) });
		this.element = el("li.model.endpoint", {}, el("div.endpoint-head", {}, el("h3", {}, name), this.health, this.act), this.facts.list);
		this.name = name;
	}

	show(model) {
		const { facts } = this, { state, since_at: since, failure, progress, unloads_at: unloads } = model;
		const failed = state === "unloaded" && failure;
		this.action = state === "loaded" || state === "draining" ? "unload" : "load";
		write(this.act, title(this.action));
		this.act.setAttribute("aria-label", `${title(this.action)} model ${this.name}`);
		this.act.disabled = state === "loading" || state === "unloading" || state === "draining";
		write(this.health, `${MODEL_SIGNS[state] ?? "○"} ${state}${progress == null ? "" : ` ${percent(progress)}`} for ${duration(Math.max(0, feed.now() - since))}`);
		this.health.dataset.health = failed ? "failed" : state;
		facts.set("Why", failed ? failure : model.reason);
		facts.set("Memory", bytes(model.bytes));
		facts.set("Requests", `${count(model.leases)} use it, ${count(model.waiting)} wait`);
		facts.set("Stays", model.pinned ? "always" : unloads == null ? "until its memory is needed" : `${duration(Math.max(0, unloads - feed.now()))} if it is idle`);
	}
}

const MODEL_SIGNS = { loaded: "●", draining: "◐", loading: "◌", unloading: "◌" };
const modelCards = new Map();

export function updateModels() {
	const { models } = feed.state;
	show(find("models-panel"), models != null);
	if (!models) return;
	for (const [name, model] of Object.entries(models)) {
		let card = modelCards.get(name);
		if (!card) {
			modelCards.set(name, (card = new ModelCard(name)));
			find("models").append(card.element);
		}
		card.show(model);
	}
	const held = Object.values(models).filter((model) => model.state !== "unloaded");
	const waiting = Object.values(models).reduce((sum, model) => sum + model.waiting, 0);
	write(find("models-sum"), `${count(held.length)} of ${many(Object.keys(models).length, "model")} in memory, ${bytes(held.reduce((sum, model) => sum + model.bytes, 0))}, ${many(waiting, "request")} waiting`);
}

async function change(name, action) {
	try {
		await key.ask(`models/${action}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ model: name }) });
		note("");
	} catch ({ message }) {
		say(`${name}: ${message}`);
		note(`${name}: ${message}`);
	}
}

const cards = new Map();
const places = new Map(); // where each request was
let asked = null;

on("drain-form", { submit: (event) => { event.preventDefault(); drain(); } });
on("drain-no", { click: () => find("drain-dialog").close() });
on(feed, { snapshot: () => places.clear() });

export function updateEndpoints() {
	const { endpoints, queues, requests } = feed.state;
	show(find("endpoints-panel"), endpoints != null);
	if (!endpoints) return;
	for (const [name, card] of cards) {
		if (endpoints[name]) continue;
		card.element.remove();
		cards.delete(name);
	}
	for (const [name, endpoint] of Object.entries(endpoints)) {
		let card = cards.get(name);
		if (!card) {
			cards.set(name, (card = new Card(name)));
			find("endpoints").append(card.element);
		}
		card.show(endpoint);
	}
	const all = Object.values(endpoints), well = all.filter((endpoint) => endpoint.health === "healthy").length;
	write(find("endpoints-sum"), `${count(well)} of ${many(all.length, "endpoint")} healthy, ${count(queues?.waiting ?? 0)} in the queue${queues?.moving ? `, ${count(queues.moving)} moving` : ""}`);
	noteMoves(requests);
}

function noteMoves(requests) {
	const list = find("move-list");
	for (const [name, { id, endpoint, ended_at }] of Object.entries(requests)) {
		const before = places.get(name);
		if (endpoint) places.set(name, endpoint);
		if (!before || !endpoint || before === endpoint || ended_at != null) continue;
		list.prepend(el("li", {}, el("time", {}, new Date().toLocaleTimeString("en", { hour12: false })), ` ${id}: ${before} → ${endpoint}`));
		while (list.children.length > MOVES_MAX) list.lastChild.remove();
	}
	for (const name of places.keys()) if (!requests[name]) places.delete(name);
	show(find("moves"), list.children.length > 0);
}

function ask(name) {
	asked = name;
	write(find("drain-title"), `Drain ${name}?`);
	find("drain-dialog").showModal();
}

async function drain() {
	const name = asked, query = find("drain-move").checked ? "?move=true" : "";
	find("drain-dialog").close();
	try {
		await key.ask(`endpoints/${pathOf(name)}/drain${query}`, { method: "POST" });
		say(`${name} is being drained`);
		note("");
	} catch ({ message }) {
		say(`${name} could not be drained: ${message}`);
		note(`${name} could not be drained: ${message}`);
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

/** The connector's counts, and faults by kind. */
function flat({ counts: more, faults, ...transfers }) {
	const named = Object.entries(faults ?? {}).map(([kind, total]) => [`faults: ${kind}`, total]);
	return [...Object.entries({ ...transfers, ...more }), ...named];
}

const counts = new Terms(find("transfers"));

export function updateTransfers() {
	const { transfers, requests, stats } = feed.state;
	const held = Object.values(requests).filter((request) => request.state === "held");
	show(find("transfers-panel"), transfers != null || held.length > 0);
	write(find("transfers-sum"), `${many(stats.blocks_held ?? 0, "block")} held`);
	const lines = held.slice(0, 20).map((request) => {
		const left = request.held_until == null ? "" : `, ${duration(Math.max(0, request.held_until - feed.now()))} left at most`;
		return `${request.id}: ${many(blocksOf(request), "block")}${left}`;
	});
	const list = find("holds");
	while (list.children.length > lines.length) list.lastChild.remove();
	lines.forEach((line, index) => write(list.children[index] ?? list.appendChild(el("li")), line));
	for (const [name, value] of flat(transfers ?? {})) {
		const words = title(name.replace(/_total\b/, "").replaceAll("_", " "));
		if (value || counts.has(words)) counts.set(words, valued(name, value)); // what has never been is not listed
	}
}
