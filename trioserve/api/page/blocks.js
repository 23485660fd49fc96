/** The map of KV blocks: a cell for each, painted when it changes. Who uses which block is put together here. */

import { count, duration, el, find, many, percent, prefersStill, show, write } from "./words.js";

const FREE = 0, CACHED = 1, USED = 2, HELD = 3;
export const STATES = ["free", "cached", "used", "held"];
export const COLOURS = 8;
const HEIGHT_MAX = 440; // CSS pixels, unless cells would be too small to be seen
const CELL_MIN = 2, CELL_MAX = 16;
const MARKS_MIN = 5; // device pixels of a cell from which on states have a shape, too
const FLASH_SECONDS = 1.4;
const SHARED = 64;

/** Which live request has which block and colour. Blocks may have several owners: a shared prefix. */
export class Owners {
	#colours = new Map();
	#uses = new Array(COLOURS).fill(0);
	#ranges = new Map();
	counts = new Uint8Array(0);
	colours = new Uint8Array(0);

	reset(blockCount) {
		this.counts = new Uint8Array(blockCount);
		this.colours = new Uint8Array(blockCount);
		this.#ranges.clear();
	}

	/** The colour of a request, its own as long as there are as many colours as requests. */
	colour(name) {
		let colour = this.#colours.get(name);
		if (colour === undefined) {
			colour = this.#uses.indexOf(Math.min(...this.#uses));
			this.#uses[colour] += 1;
			this.#colours.set(name, colour);
		}
		return colour;
	}

	update(requests) {
		for (const name of this.#colours.keys()) {
			if (requests[name]) continue;
			this.#uses[this.#colours.get(name)] -= 1;
			this.#colours.delete(name);
		}
		this.#ranges.clear();
		this.counts.fill(0);
		for (const [name, request] of Object.entries(requests)) {
			const colour = this.colour(name);
			if (!request.blocks?.length) continue;
			this.#ranges.set(name, request.blocks);
			for (const [first, length] of request.blocks) {
				for (let block = first; block < first + length; block += 1) {
					if (this.counts[block]++ === 0) this.colours[block] = colour;
				}
			}
		}
	}

	ranges(name) { return this.#ranges.get(name) ?? []; }

	of(block) {
		const names = [];
		for (const [name, ranges] of this.#ranges) {
			if (ranges.some(([first, length]) => block >= first && block < first + length)) names.push(name);
		}
		return names;
	}
}

/** Colours of the page as canvases want them. */
export function paint(name) {
	const probe = find("map");
	probe.style.color = `var(--${name})`;
	const colour = getComputedStyle(probe).color;
	probe.style.color = "";
	return colour;
}

export class BlockMap {
	#feed;
	#owners;
	#onChoose;
	#base = find("map-cells");
	#top = find("map-marks");
	#tip = find("map-tip");
	#drawn = new Uint8Array(0);
	#palette = null;
	#cell = 8;
	#gap = 1;
	#columns = 1;
	#flashes = [];
	#pointed = null;
	#cursor = null;
	#chosen = null;
	#frame = 0;

	/** onChoose: called with the name of a request, or null. */
	constructor(feed, owners, onChoose) {
		[this.#feed, this.#owners, this.#onChoose] = [feed, owners, onChoose];
		new ResizeObserver(() => this.layOut()).observe(find("map"));
		const top = this.#top;
		top.addEventListener("pointermove", (event) => this.#point(event));
		top.addEventListener("pointerleave", () => { this.#pointed = null; this.#mark(); });
		top.addEventListener("click", (event) => { this.#point(event); this.#choose(this.#pointed); });
		top.addEventListener("keydown", (event) => this.#onKey(event));
		top.addEventListener("focus", () => { if (top.matches(":focus-visible")) this.#move(this.#cursor ?? 0); });
		top.addEventListener("blur", () => { this.#cursor = null; this.#mark(); });
	}

	/** Which request stands out; null: none. */
	choose(name) {
		if (this.#chosen === name) return;
		this.#chosen = name;
		this.#mark();
	}

	/** For a new snapshot, another width or other colours: everything is painted anew. */
	layOut() {
		const { state } = this.#feed;
		const total = state?.cells.length ?? 0;
		if (state) this.#tell();
		show(find("map"), total > 0);
		const width = find("map").clientWidth;
		if (!total || !width) return;
		const scale = devicePixelRatio || 1;
		const across = Math.floor(width * scale);
		const fits = (cell) => Math.ceil(total / Math.floor(across / cell)) * cell <= HEIGHT_MAX * scale;
		let cell = Math.floor(CELL_MAX * scale);
		while (cell > CELL_MIN * scale && !fits(cell)) cell -= 1;
		this.#cell = cell;
		this.#gap = cell >= 8 * scale ? Math.round(1.5 * scale) : cell >= 4 ? 1 : 0;
		this.#columns = Math.floor(across / cell);
		const height = Math.ceil(total / this.#columns) * cell;
		for (const canvas of [this.#base, this.#top]) {
			canvas.width = across;
			canvas.height = height;
			canvas.style.height = `${height / scale}px`;
		}
		const owned = (name) => Array.from({ length: COLOURS }, (_, index) => paint(`${name}-${index}`));
		this.#palette = {
			free: paint("free"), cached: paint("cached"), other: paint("other"), ground: paint("panel"),
			ink: paint("ink"), accent: paint("accent"), owners: owned("owner"),
		};
		if (this.#drawn.length !== total) this.#flashes = [];
		this.#drawn = new Uint8Array(total).fill(255);
		this.update();
	}

	/** Paint what has changed. */
	update() {
		const { state } = this.#feed;
		this.#tell();
		if (!this.#palette || this.#drawn.length !== state.cells.length) return;
		const { counts, colours } = this.#owners;
		const { cells } = state;
		const drawn = this.#drawn, context = this.#base.getContext("2d");
		const now = performance.now() / 1000, isAnew = drawn[0] === 255;
		for (let block = 0; block < cells.length; block += 1) {
			let look = cells[block];
			if (look >= USED) {
				if (counts[block]) look |= (colours[block] + 1) << 2;
				if (counts[block] > 1) look |= SHARED;
			}
			if (look === drawn[block]) continue;
			if (!isAnew && look < USED && (drawn[block] & 3) >= USED) this.#flashes.push([block, now]);
			drawn[block] = look;
			this.#paintCell(context, block, look);
		}
		this.#mark();
	}

	#paintCell(context, block, look) {
		const palette = this.#palette, cell = this.#cell, size = cell - this.#gap;
		const x = (block % this.#columns) * cell, y = Math.floor(block / this.#columns) * cell;
		const state = look & 3, isShared = look >= SHARED, owner = (look & (SHARED - 1)) >> 2;
		const colour = owner ? palette.owners[owner - 1] : palette.other;
		const hasMarks = size >= MARKS_MIN;
		context.fillStyle = state >= USED ? (isShared && !hasMarks ? palette.ink : colour) : palette.free;
		context.fillRect(x, y, size, size);
		if (state === CACHED) {
			context.fillStyle = palette.cached;
			if (hasMarks) context.fillRect(x, y + Math.ceil(size / 2), size, Math.floor(size / 2));
			else context.fillRect(x, y, size, size);
		} else if (state === HELD) {
			context.fillStyle = hasMarks ? palette.ground : palette.ink;
			const stripe = Math.max(1, Math.round(size / 7));
			if (hasMarks) for (const at of [0.25, 0.6]) context.fillRect(x, y + Math.round(size * at), size, stripe);
			else context.fillRect(x, y, size, Math.ceil(size / 2));
		} else if (isShared && hasMarks) {
			const inner = Math.max(2, Math.round(size * 0.4)), at = Math.floor((size - inner) / 2);
			context.fillStyle = palette.ground;
			context.fillRect(x + at, y + at, inner, inner);
		}
	}

	// --- marks above the cells: what is pointed at, chosen, or has just come free ---

	#mark() {
		if (!this.#frame) this.#frame = requestAnimationFrame(() => { this.#frame = 0; this.#paintMarks(); });
	}

	#place(block) {
		return [(block % this.#columns) * this.#cell, Math.floor(block / this.#columns) * this.#cell];
	}

	#paintMarks() {
		if (!this.#palette) return;
		const context = this.#top.getContext("2d"), cell = this.#cell, size = cell - this.#gap;
		const scale = devicePixelRatio || 1;
		context.clearRect(0, 0, this.#top.width, this.#top.height);
		const name = this.#chosen ?? this.#hoveredOwner();
		const ranges = name ? this.#owners.ranges(name) : [];
		if (ranges.length) {
			context.globalAlpha = 0.72;
			context.fillStyle = this.#palette.ground;
			context.fillRect(0, 0, this.#top.width, this.#top.height);
			context.globalAlpha = 1;
			for (const [first, length] of ranges) {
				for (let block = first; block < first + length; block += 1) context.clearRect(...this.#place(block), cell, cell);
			}
		}
		const now = performance.now() / 1000;
		this.#flashes = this.#flashes.filter(([, since]) => now - since < FLASH_SECONDS);
		context.fillStyle = this.#palette.accent;
		for (const [block, since] of this.#flashes) {
			context.globalAlpha = prefersStill.matches ? 0.6 : 0.9 * (1 - (now - since) / FLASH_SECONDS);
			context.fillRect(...this.#place(block), size, size);
		}
		context.globalAlpha = 1;
		const at = this.#cursor ?? this.#pointed;
		if (at !== null) {
			const [x, y] = this.#place(at), line = Math.max(2, Math.round(2 * scale));
			context.strokeStyle = this.#palette.ink;
			context.lineWidth = line;
			context.strokeRect(x - line / 2, y - line / 2, size + line, size + line);
		}
		this.#showTip(at);
		if (this.#flashes.length) this.#mark();
	}

	#hoveredOwner() {
		const at = this.#cursor ?? this.#pointed;
		if (at === null || !this.#owners.counts[at]) return null;
		return this.#owners.of(at)[0] ?? null;
	}

	#showTip(block) {
		const tip = this.#tip;
		show(tip, block !== null);
		if (block === null) return;
		write(tip, this.describe(block));
		const scale = devicePixelRatio || 1, [x, y] = this.#place(block).map((value) => value / scale);
		const room = find("map").clientWidth - tip.offsetWidth;
		tip.style.left = `${Math.max(0, Math.min(room, x - 20))}px`;
		tip.style.top = `${y + this.#cell / scale + 8}px`;
	}

	/** One block in words. */
	describe(block) {
		const { state } = this.#feed;
		const kind = state.cells[block], names = this.#owners.of(block);
		const ids = names.map((name) => state.requests[name]?.id ?? name);
		const head = `Block ${count(block)}: `;
		if (kind === FREE) return `${head}free`;
		if (kind === CACHED) return `${head}cached, nobody uses it`;
		if (!ids.length) return `${head}${STATES[kind]}`;
		if (kind === USED) {
			const shown = ids.slice(0, 4).join(", ") + (ids.length > 4 ? ` and ${ids.length - 4} more` : "");
			return ids.length > 1 ? `${head}shared by ${ids.length}: ${shown}` : `${head}used by ${shown}`;
		}
		const until = state.requests[names[0]]?.held_until;
		const left = until == null ? "" : `, for ${duration(Math.max(0, until - this.#feed.now()))} at most`;
		return `${head}held for ${ids[0]}${left}`;
	}

	// --- pointer and keys ---

	#blockAt(event) {
		const box = this.#top.getBoundingClientRect(), scale = devicePixelRatio || 1;
		const column = Math.floor(((event.clientX - box.left) * scale) / this.#cell);
		const row = Math.floor(((event.clientY - box.top) * scale) / this.#cell);
		const block = row * this.#columns + column;
		return column >= 0 && column < this.#columns && row >= 0 && block < this.#drawn.length ? block : null;
	}

	#point(event) {
		this.#pointed = this.#blockAt(event);
		this.#cursor = null;
		this.#mark();
	}

	#choose(block) {
		const name = block === null ? null : this.#owners.of(block)[0] ?? null;
		this.#onChoose(name);
	}

	#onKey(event) {
		const total = this.#drawn.length;
		if (!total) return;
		const at = this.#cursor ?? 0;
		const rows = this.#columns;
		const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + rows, ArrowUp: at - rows, Home: 0, End: total - 1 };
		if (event.key in moves) this.#move(moves[event.key]);
		else if (event.key === "PageDown" || event.key === "PageUp") this.#move(this.#border(at, event.key === "PageDown" ? 1 : -1));
		else if (event.key === "Enter" || event.key === " ") this.#choose(at);
		else if (event.key === "Escape") this.#onChoose(null);
		else return;
		event.preventDefault();
	}

	/** Where, from a block on, one of another kind or request comes. */
	#border(at, step) {
		const drawn = this.#drawn, look = drawn[at];
		let block = at;
		while (block >= 0 && block < drawn.length && drawn[block] === look) block += step;
		return block;
	}

	#move(block) {
		this.#cursor = Math.max(0, Math.min(this.#drawn.length - 1, block));
		this.#pointed = null;
		write(find("map-said"), this.describe(this.#cursor));
		this.#mark();
	}

	// --- counts ---

	#legend = null;

	#tell() {
		const { stats, server } = this.#feed.state;
		show(find("blocks-panel"), server.block_count > 0 && stats.blocks_free != null);
		let shared = 0;
		for (const users of this.#owners.counts) if (users > 1) shared += 1;
		const figures = [...STATES.map((name) => stats[`blocks_${name}`] ?? 0), shared];
		const names = ["Free", "Cached", "Used", "Held", "Shared prefix"];
		if (!this.#legend) {
			this.#legend = names.map((name, index) => {
				const value = el("dd");
				const swatch = el(`i.swatch.${STATES[index] ?? "shared"}`, { "aria-hidden": "true" });
				find("legend").append(el("div", {}, el("dt", {}, swatch, name), value));
				return value;
			});
		}
		this.#legend.forEach((value, index) => write(value, count(figures[index])));
		const taken = server.block_count ? (figures[USED] + figures[HELD]) / server.block_count : 0;
		const size = server.block_size;
		write(find("blocks-sum"), `${many(server.block_count, "block")}${size ? ` of ${size} tokens` : ""}, ${percent(taken)} in use`);
	}
}
