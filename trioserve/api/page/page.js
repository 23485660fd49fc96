/** The page: passes the feed's changes to its parts. */

import * as map from "./blocks.js";
import { note, updateEndpoints, updateModels, updateTransfers } from "./endpoints.js";
import { feed } from "./feed.js";
import { showKey, showStatus as showConnection, whenKeyIsSet, whenThemeChanges } from "./frame.js";
import * as playground from "./playground.js";
import { updatePlots, updateSteps } from "./plots.js";
import * as requests from "./requests.js";
import { count, duration, el, figure, find, on, percent, Rate, say, show, write } from "./words.js";

const { owners } = map;
map.whenChosen(requests.choose);
requests.whenPointed(map.choose);

// --- what the feed brings ---

function begin() {
	const { server, cells } = feed.state;
	owners.reset(cells.length);
	owners.update(feed.state.requests);
	showServer(server);
	map.layOut();
	updateAll({ history: true });
	playground.readModels();
}

function change({ detail }) {
	if (owners.counts.length !== feed.state.cells.length) {
		owners.reset(feed.state.cells.length);
		owners.update(feed.state.requests);
		map.layOut();
	}
	if (detail.requests) owners.update(feed.state.requests);
	if (detail.server) showServer(feed.state.server);
	if (detail.requests || detail.blocks || detail.stats) map.update();
	updateAll(detail);
}

function updateAll(changed) {
	if (changed.history) updatePlots();
	updateSteps();
	requests.update();
	updateEndpoints();
	updateModels();
	updateTransfers();
	playground.update();
	showFigures();
}

function showServer(server) {
	write(find("model"), server.model ?? "");
	document.title = `${server.model ? `${server.model} · ` : ""}trioserve`;
	const parts = [`trioserve ${server.version}`, server.kind === "router" ? `router${server.process ? `, process ${server.process}` : ""}` : null, server.executor, server.role && server.role !== "both" ? `role ${server.role}` : null,
		server.max_num_seqs && `${count(server.max_num_seqs)} sequences at a time`, server.max_model_len && `${count(server.max_model_len)} tokens of context`];
	write(find("about"), parts.filter(Boolean).join(" · "));
	const notes = [server.is_draining && "This server is draining: it takes nothing new.", server.sees === "own" && "With this key you see your own requests; counts are everybody's.",
		server.restarts && `The engine broke and was opened anew (${count(server.restarts)}); streams went on.`,
		server.process && "This router is several processes, and the page shows the one that it reached: load it anew to reach another."];
	note(notes.filter(Boolean).join(" "));
}

// --- figures of this moment ---

const shares = (name) => [
	({ history }) => history?.series[`${name}_p50`] && duration(latest(history.series[`${name}_p50`])),
	({ history }) => `p95 ${duration(latest(history.series[`${name}_p95`]))}`,
];
const taken = ({ stats }) => (stats.blocks_used ?? 0) + (stats.blocks_held ?? 0);
const FIGURES = [
	["Tokens/s", () => rated(tokensPerSecond()), ({ stats }) => `${count(stats.generation_tokens_total)} in all`],
	["Requests/s", ({ history }) => rated(latest(history?.series.requests_per_second)), ({ stats }) => `${count(stats.admissions_total)} in all`],
	["Running", ({ stats }) => count(stats.running), ({ server }) => (server.max_num_seqs ? `of ${count(server.max_num_seqs)}` : "")],
	["Waiting", ({ stats }) => count(stats.waiting), ({ stats }) => (stats.preemptions_total ? `${count(stats.preemptions_total)} preempted in all` : "")],
	["KV in use", (state) => (map.blockTotal(state) ? percent(taken(state) / map.blockTotal(state)) : null),
		(state) => `${count(taken(state))} of ${count(map.blockTotal(state))} blocks`],
	["Wait in the queue", ...shares("queue_wait")], ["First token", ...shares("ttft")], ["Between tokens", ...shares("itl")],
	["Sessions", ({ stats }) => (stats.sessions ? count(stats.sessions) : null), ({ stats }) => `${count(stats.retained_blocks)} blocks retained`],
	["Websockets", ({ stats }) => (stats.websockets ? count(stats.websockets) : null), () => "open"],
	["Streams continued", ({ stats }) => (stats.continued_total == null ? null : count(stats.continued_total)), ({ stats }) => `${count(stats.moved_total)} moved on purpose`],
];

const shownFigures = FIGURES.map(([title, value, more]) => {
	const parts = { value: el("dd.value"), more: el("dd.more") };
	const element = el("div", {}, el("dt", {}, title), parts.value, parts.more);
	find("figures").append(element);
	return { ...parts, element, of: value, moreOf: more };
});

const rated = (value) => (value == null ? null : figure(value));

/** The last value of the last minute. */
function latest(series) {
	return series?.slice(-12).findLast((value) => value != null);
}

let rate = null;

function tokensPerSecond() {
	const total = feed.state.stats.generation_tokens_total, now = feed.now();
	if (total == null) return latest(feed.state.history?.series.tokens_per_second);
	return (rate ??= new Rate(now, total)).of(now, total);
}

function showFigures() {
	for (const { element, value, more, of, moreOf } of shownFigures) {
		const text = of(feed.state);
		show(element, text != null);
		if (text == null) continue;
		write(value, text);
		write(more, moreOf(feed.state));
	}
}

// Ages, deadlines and rates also change without new data.
setInterval(() => {
	if (!feed.state || document.hidden) return;
	requests.update();
	updateTransfers();
	updateEndpoints();
	updateModels();
	showFigures();
}, 1000);

// --- connection and key ---

function showStatus({ detail: { kind, text, message } }) {
	showConnection(kind, text);
	showKey(kind === "key" ? message : null);
}
whenKeyIsSet(() => feed.start());

// --- views and colours ---

function showView() {
	const view = location.hash === "#playground" ? "playground" : "live";
	for (const name of ["live", "playground"]) show(find(name), name === view);
	for (const link of document.querySelectorAll("nav a")) {
		if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
		else link.removeAttribute("aria-current");
	}
}
addEventListener("hashchange", () => {
	if (location.hash === "#main") return;
	showView();
	scrollTo(0, 0);
	find("main").focus({ preventScroll: true });
});
showView();

whenThemeChanges(() => { if (feed.state) map.layOut(); });

on(window, { error: (event) => say(`The page itself failed: ${event.message}`) });
on(feed, { snapshot: begin, change, status: showStatus });
feed.start();
