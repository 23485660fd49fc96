/** Reads the server's snapshot and changes, and reconnects when the stream breaks. */

import { errorOf, eventsOf, key } from "./asking.js";
import { on } from "./words.js";

const SILENT_SECONDS_MAX = 40; // a comment comes every 15
const HIDDEN_SECONDS_MAX = 20; // a tab that nobody sees leaves its place to others
const RETRY_SECONDS = [0.3, 1, 2, 4, 8];

/**
 * Events: "snapshot" (all is new), "change" (detail: what the server sent), "status" (detail: {kind, text}).
 * state: as the protocol has it, with `cells`, a byte for each block, in the place of `blocks`.
 */
class Feed extends EventTarget {
	state = null;
	#abort = null;
	#offset = 0;
	#failures = 0;
	#wasLive = false;

	constructor() {
		super();
		on(document, { visibilitychange: () => this.#onVisibility() });
	}

	/** The server's clock, in seconds. */
	now() { return performance.now() / 1000 + this.#offset; }

	/** Reads until the server wants a key. A new call starts again. */
	async start() {
		this.#abort?.abort();
		const abort = (this.#abort = new AbortController());
		while (!abort.signal.aborted) {
			let wait = RETRY_SECONDS[Math.min(this.#failures, RETRY_SECONDS.length - 1)];
			try {
				const response = await key.fetch("ui/events", { signal: abort.signal, cache: "no-store" });
				if (response.status === 401 || response.status === 403) {
					this.#tell("key", "An API key is needed", { message: await errorOf(response) });
					return;
				}
				if (!response.ok) {
					wait = Number(response.headers.get("Retry-After")) || wait;
					this.#tell("lost", `${await errorOf(response)}; trying again`);
				} else {
					await this.#read(response, abort);
					this.#lost();
				}
			} catch (error) {
				if (abort.signal.aborted && abort.signal.reason !== "silent") return;
				this.#lost();
			}
			if (abort.signal.aborted) return void this.start();
			this.#failures += 1;
			await new Promise((resolve) => {
				const timer = setTimeout(resolve, wait * 1000);
				abort.signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
			});
		}
	}

	#lost() { this.#tell("lost", this.#wasLive ? "Connection lost, trying again" : "No connection, trying again"); }

	#tell(kind, text, more = {}) {
		this.dispatchEvent(new CustomEvent("status", { detail: { kind, text, ...more } }));
	}

	async #read(response, abort) {
		let silence;
		const wait = () => {
			clearTimeout(silence);
			silence = setTimeout(() => abort.abort("silent"), SILENT_SECONDS_MAX * 1000);
		};
		try {
			wait();
			for await (const events of eventsOf(response)) {
				wait();
				for (const [event, data] of events) this.#take(event, JSON.parse(data));
			}
		} finally {
			clearTimeout(silence);
		}
	}

	#take(event, value) {
		if (value.now !== undefined) this.#offset = value.now - performance.now() / 1000;
		if (event === "snapshot") this.#begin(value);
		else if (event === "change" && this.state) this.#change(value);
	}

	#begin(snapshot) {
		const before = this.state?.server;
		const { blocks, ...state } = snapshot;
		state.cells = new Uint8Array((blocks && state.server.block_count) || 0);
		let at = 0;
		for (const [length, kind] of blocks ?? []) state.cells.fill(kind, at, (at += length));
		this.state = state;
		this.#failures = 0;
		this.dispatchEvent(new Event("snapshot"));
		const isNew = before && state.server.started_at !== before.started_at;
		const text = !this.#wasLive ? "Live" : isNew ? "Live: the server was started again" : "Live again";
		this.#wasLive = true;
		this.#tell("live", text);
	}

	#change(change) {
		const { state } = this;
		for (const [name, value] of Object.entries(change)) {
			if (name === "blocks") {
				const total = (value && state.server.block_count) || 0;
				if (state.cells.length !== total) state.cells = new Uint8Array(total);
				for (const [first, length, kind] of value ?? []) state.cells.fill(kind, first, first + length);
			} else if (name === "requests" || (name === "endpoints" && value && state.endpoints)) {
				merge(state[name], value);
			} else if (name === "history" && value?.points && state.history) {
				this.#addPoint(value);
			} else {
				state[name] = value;
			}
		}
		this.dispatchEvent(new CustomEvent("change", { detail: change }));
	}

	#addPoint({ at, points }) {
		const { history } = this.state;
		history.at = at;
		for (const [name, values] of Object.entries(points)) {
			const series = (history.series[name] ??= []);
			series.push(...values);
			if (series.length > 180) series.splice(0, series.length - 180);
		}
	}

	#hiddenTimer = 0;
	#onVisibility() {
		clearTimeout(this.#hiddenTimer);
		if (document.hidden) {
			this.#hiddenTimer = setTimeout(() => {
				this.#abort?.abort();
				this.#abort = null;
				this.#tell("paused", "Paused while hidden");
			}, HIDDEN_SECONDS_MAX * 1000);
		} else if (!this.#abort) {
			this.start();
		}
	}
}

export const feed = new Feed();

function merge(into, changes) {
	for (const [id, fields] of Object.entries(changes)) {
		if (fields === null) delete into[id];
		else if (into[id]) Object.assign(into[id], fields);
		else into[id] = fields;
	}
}
