/** The map of KV blocks: paints a cell for each block when the block changes, and finds its owners. */

import { feed } from "./feed.js";
import { count, duration, find, many, on, percent, prefersStill, show, swatch, Terms, title, write } from "./words.js";

const FREE = 0, CACHED = 1, USED = 2, HELD = 3, RETIRED = 4;
const STATES = ["free", "cached", "used", "held", "retired"];
const COLOURS = 8;
const HEIGHT_MAX = 440; // CSS pixels, unless cells would be too small to be seen
const CELL_MIN = 2, CELL_MAX = 16;
const MARKS_MIN = 5; // device pixels of a cell from which on states have a shape, too
const FLASH_SECONDS = 1.4;
// The look of a cell in a byte: state in 3 bits, colour + 1 of the owner or 0 in 4 bits, and SHARED.
const OWNER_SHIFT = 3, STATE_MASK = 7, SHARED = 128;

const isTaken = (state) => state === USED || state === HELD;

/** Blocks and colours of live requests. A block of a shared prefix has several owners. */
class Owners {
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

	/** Returns a request's colour. Requests share colours if there are too few. */
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

export const owners = new Owners();

/** Colours of the page as canvases want them. */
function paint(name) {
	const probe = find("map");
	probe.style.color = `var(--${name})`;
	const colour = getComputedStyle(probe).color;
	probe.style.color = "";
	return colour;
}

let onChoose;
const base = find("map-cells");
const top = find("map-marks");
const tip = find("map-tip");
let drawn = new Uint8Array(0);
let palette = null;
let cell = 8;
let gap = 1;
let columns = 1;
let flashes = [];
let pointed = null;
let cursor = null;
let chosen = null;
let frame = 0;

/** listener: called with the name of a request, or null. */
export function whenChosen(listener) { onChoose = listener; }

/** Highlights a request, or none (null). */
export function choose(name) {
	if (chosen === name) return;
	chosen = name;
	mark();
}

/** Paints all cells again, after a new snapshot, width or colour scheme. */
export function layOut() {
	const { state } = feed;
	const total = state?.cells.length ?? 0;
	if (state) tell();
	show(find("map"), total > 0);
	const width = find("map").clientWidth;
	if (!total || !width) return;
	const scale = devicePixelRatio;
	const across = Math.floor(width * scale);
	const fits = (size) => Math.ceil(total / Math.floor(across / size)) * size <= HEIGHT_MAX * scale;
	cell = Math.floor(CELL_MAX * scale);
	while (cell > CELL_MIN * scale && !fits(cell)) cell -= 1;
	gap = cell >= 8 * scale ? Math.round(1.5 * scale) : cell >= 4 ? 1 : 0;
	columns = Math.floor(across / cell);
	const height = Math.ceil(total / columns) * cell;
	for (const canvas of [base, top]) {
		canvas.width = across;
		canvas.height = height;
		canvas.style.height = `${height / scale}px`;
	}
	const owned = (name) => Array.from({ length: COLOURS }, (_, index) => paint(`${name}-${index}`));
	palette = {
		free: paint("free"), cached: paint("cached"), other: paint("other"), ground: paint("panel"),
		ink: paint("ink"), accent: paint("accent"), owners: owned("owner"),
	};
	if (drawn.length !== total) flashes = [];
	drawn = new Uint8Array(total).fill(255);
	update();
}

/** Paint what has changed. */
export function update() {
	const { state } = feed;
	tell();
	if (!palette || drawn.length !== state.cells.length) return;
	const { counts, colours } = owners;
	const { cells } = state;
	const context = base.getContext("2d");
	const now = performance.now() / 1000, isAnew = drawn[0] === 255;
	for (let block = 0; block < cells.length; block += 1) {
		let look = cells[block];
		if (isTaken(look)) {
			if (counts[block]) look |= (colours[block] + 1) << OWNER_SHIFT;
			if (counts[block] > 1) look |= SHARED;
		}
		if (look === drawn[block]) continue;
		if (!isAnew && !isTaken(look & STATE_MASK) && isTaken(drawn[block] & STATE_MASK)) flashes.push([block, now]);
		drawn[block] = look;
		paintCell(context, block, look);
	}
	mark();
}

function paintCell(context, block, look) {
	const size = cell - gap;
	const x = (block % columns) * cell, y = Math.floor(block / columns) * cell;
	const state = look & STATE_MASK, isShared = look >= SHARED, owner = (look & (SHARED - 1)) >> OWNER_SHIFT;
	const colour = owner ? palette.owners[owner - 1] : palette.other;
	const hasMarks = size >= MARKS_MIN;
	context.fillStyle = isTaken(state) ? (isShared && !hasMarks ? palette.ink : colour) : palette.free;
	context.fillRect(x, y, size, size);
	if (state === CACHED) {
		context.fillStyle = palette.cached;
		if (hasMarks) context.fillRect(x, y + Math.ceil(size / 2), size, Math.floor(size / 2));
		else context.fillRect(x, y, size, size);
	} else if (state === HELD) {
		context.fillStyle = palette.ground;
		const stripe = Math.max(1, Math.round(size / 7));
		if (hasMarks) for (const at of [0.25, 0.6]) context.fillRect(x, y + Math.round(size * at), size, stripe);
		else context.fillRect(x, y, size, Math.ceil(size / 2));
	} else if (state === RETIRED) {
		context.fillStyle = palette.ground;
		if (hasMarks) context.fillRect(x + 1, y + 1, size - 2, size - 2);
		else context.fillRect(x, y, size, size);
	} else if (isShared && hasMarks) {
		const inner = Math.max(2, Math.round(size * 0.4)), at = Math.floor((size - inner) / 2);
		context.fillStyle = palette.ground;
		context.fillRect(x + at, y + at, inner, inner);
	}
}

// --- marks on cells: pointed at, chosen, or just freed ---

function mark() {
	if (!frame) frame = requestAnimationFrame(() => { frame = 0; paintMarks(); });
}

function place(block) {
	return [(block % columns) * cell, Math.floor(block / columns) * cell];
}

function paintMarks() {
	if (!palette) return;
	const context = top.getContext("2d"), size = cell - gap;
	context.clearRect(0, 0, top.width, top.height);
	const name = chosen ?? hoveredOwner();
	const ranges = name ? owners.ranges(name) : [];
	if (ranges.length) {
		context.globalAlpha = 0.72;
		context.fillStyle = palette.ground;
		context.fillRect(0, 0, top.width, top.height);
		context.globalAlpha = 1;
		for (const [first, length] of ranges) {
			for (let block = first; block < first + length; block += 1) context.clearRect(...place(block), cell, cell);
		}
	}
	const now = performance.now() / 1000;
	flashes = flashes.filter(([, since]) => now - since < FLASH_SECONDS);
	context.fillStyle = palette.accent;
	for (const [block, since] of flashes) {
		context.globalAlpha = prefersStill.matches ? 0.6 : 0.9 * (1 - (now - since) / FLASH_SECONDS);
		context.fillRect(...place(block), size, size);
	}
	context.globalAlpha = 1;
	const at = cursor ?? pointed;
	if (at !== null) {
		const [x, y] = place(at), line = Math.max(2, Math.round(2 * devicePixelRatio));
		context.strokeStyle = palette.ink;
		context.lineWidth = line;
		context.strokeRect(x - line / 2, y - line / 2, size + line, size + line);
	}
	showTip(at);
	if (flashes.length) mark();
}

function hoveredOwner() {
	const at = cursor ?? pointed;
	if (at === null || !owners.counts[at]) return null;
	return owners.of(at)[0] ?? null;
}

function showTip(block) {
	show(tip, block !== null);
	if (block === null) return;
	write(tip, describe(block));
	const scale = devicePixelRatio, [x, y] = place(block).map((value) => value / scale);
	const room = find("map").clientWidth - tip.offsetWidth;
	tip.style.left = `${Math.max(0, Math.min(room, x - 20))}px`;
	tip.style.top = `${y + cell / scale + 8}px`;
}

/** One block in words. */
function describe(block) {
	const { state } = feed;
	const kind = state.cells[block], names = owners.of(block);
	const ids = names.map((name) => state.requests[name]?.id ?? name);
	const head = `Block ${count(block)}: `;
	if (kind === RETIRED) return `${head}retired, its memory is released`;
	if (kind === CACHED) return `${head}cached, not in use`;
	if (kind === FREE || !ids.length) return `${head}${STATES[kind]}`;
	if (kind === USED) {
		const shown = ids.slice(0, 4).join(", ") + (ids.length > 4 ? ` and ${ids.length - 4} more` : "");
		return ids.length > 1 ? `${head}shared by ${ids.length}: ${shown}` : `${head}used by ${shown}`;
	}
	const until = state.requests[names[0]]?.held_until;
	const left = until == null ? "" : `, for ${duration(Math.max(0, until - feed.now()))} at most`;
	return `${head}held for ${ids[0]}${left}`;
}

// --- pointer and keys ---

function blockAt(event) {
	const box = top.getBoundingClientRect(), scale = devicePixelRatio;
	const column = Math.floor(((event.clientX - box.left) * scale) / cell);
	const row = Math.floor(((event.clientY - box.top) * scale) / cell);
	const block = row * columns + column;
	return column >= 0 && column < columns && row >= 0 && block < drawn.length ? block : null;
}

function point(event) {
	pointed = blockAt(event);
	cursor = null;
	mark();
}

function chooseAt(block) { onChoose(block === null ? null : owners.of(block)[0] ?? null); }

function onKey(event) {
	const total = drawn.length;
	if (!total) return;
	const at = cursor ?? 0;
	const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: total - 1 };
	if (event.key in moves) move(moves[event.key]);
	else if (event.key === "PageDown" || event.key === "PageUp") move(border(at, event.key === "PageDown" ? 1 : -1));
	else if (event.key === "Enter" || event.key === " ") chooseAt(at);
	else if (event.key === "Escape") onChoose(null);
	else return;
	event.preventDefault();
}

/** Finds the next block of another state or request. */
function border(at, step) {
	const look = drawn[at];
	let block = at;
	while (block >= 0 && block < drawn.length && drawn[block] === look) block += step;
	return block;
}

function move(block) {
	cursor = Math.max(0, Math.min(drawn.length - 1, block));
	pointed = null;
	write(find("map-said"), describe(cursor));
	mark();
}

// --- counts ---

const legend = new Terms(find("legend"));

/** Blocks of the pool without retired ones. */
export const blockTotal = ({ server, stats }) => (server.block_count ?? 0) - (stats.blocks_retired ?? 0);

function tell() {
	const { stats, server } = feed.state;
	show(find("blocks-panel"), server.block_count > 0 && stats.blocks_free != null);
	let shared = 0;
	for (const users of owners.counts) if (users > 1) shared += 1;
	const figures = STATES.map((name) => stats[`blocks_${name}`] ?? 0);
	STATES.forEach((name, state) => {
		// Few servers shrink their pool.
		if (state === RETIRED && !figures[state] && !legend.has(title(name))) return;
		legend.set(title(name), count(figures[state]), swatch(name));
	});
	legend.set("Shared prefix", count(shared), swatch("shared"));
	const total = blockTotal(feed.state);
	const taken = total ? (figures[USED] + figures[HELD]) / total : 0;
	const size = server.block_size;
	write(find("blocks-sum"), `${many(total, "block")}${size ? ` of ${size} tokens` : ""}, ${percent(taken)} in use`);
}

new ResizeObserver(layOut).observe(find("map"));
on(top, {
	pointermove: point,
	pointerleave: () => { pointed = null; mark(); },
	click: (event) => { point(event); chooseAt(pointed); },
	keydown: onKey,
	focus: () => { if (top.matches(":focus-visible")) move(cursor ?? 0); },
	blur: () => { cursor = null; mark(); },
});
