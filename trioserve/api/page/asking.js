/** Sends requests with the API key, for one response or a stream of events. */

/** The API key, in this tab's memory and nowhere else. */
class Key {
	#value = null;
	set(value) { this.#value = value || null; }
	get isSet() { return this.#value !== null; }

	/** As fetch, with the key. */
	fetch(path, { headers, ...options } = {}) {
		return fetch(path, { ...options, headers: this.#value ? { ...headers, Authorization: `Bearer ${this.#value}` } : headers });
	}

	/** Returns the response, or throws an Error with the reason if the request fails. */
	async ask(path, options) {
		const response = await this.fetch(path, options).catch(() => { throw new Error("no connection"); });
		if (!response.ok) throw new Error(await errorOf(response));
		return response;
	}
}

export const key = new Key();

/** "a/b c" as a part of a path: slashes stay. */
export const pathOf = (name) => name.split("/").map(encodeURIComponent).join("/");

/** Returns the message of an error response. */
export async function errorOf(response) {
	try {
		const { error } = await response.json();
		return error.message ?? `the server says ${response.status}`;
	} catch {
		return `the server says ${response.status}`;
	}
}

/** Yields the events of a response as [name, data], and an empty list for a comment. */
export async function* eventsOf(response) {
	const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	for (;;) {
		const { done, value } = await reader.read();
		if (done) return;
		const parts = (rest + value).split("\n\n");
		rest = parts.pop();
		yield parts.map((part) => [field(part, "event"), field(part, "data")]).filter(([, data]) => data);
	}
}

function field(event, name) {
	return event.split("\n").filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trim()).join("\n");
}
