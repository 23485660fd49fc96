/** Where two texts differ, word by word. */

import { el, many } from "./words.js";

const WORDS_MAX = 1500; // on each side from where they differ; a table of their product is what finding the common ones takes

/** Returns each side's parts, [text, isOwn], and counts the equal words at the start and the differing words. */
function compare(one, other) {
	const left = one.match(/\s+|\S+/g) ?? [], right = other.match(/\s+|\S+/g) ?? [];
	let start = 0;
	while (start < left.length && left[start] === right[start]) start += 1;
	const rests = [left.slice(start), right.slice(start)];
	const marks = rests.some((words) => words.length > WORDS_MAX) ? rests.map((words) => words.map(() => true)) : own(...rests);
	const parts = rests.map((words, side) => {
		const made = [[left.slice(0, start).join(""), false]];
		words.forEach((word, index) => {
			const isOwn = marks[side][index], last = made.at(-1);
			if (last[1] === isOwn) last[0] += word;
			else made.push([word, isOwn]);
		});
		return made;
	});
	const counts = rests.map((words, side) => words.filter((word, index) => marks[side][index] && word.trim()).length);
	return { parts, same: Math.ceil(start / 2), differing: Math.max(...counts) };
}

/** Finds the words outside of the longest common subsequence. */
function own(a, b) {
	const width = b.length + 1, lengths = new Uint16Array((a.length + 1) * width);
	for (let i = a.length - 1; i >= 0; i -= 1) {
		for (let j = b.length - 1; j >= 0; j -= 1) {
			lengths[i * width + j] = a[i] === b[j]
				? lengths[(i + 1) * width + j + 1] + 1
				: Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
		}
	}
	const ownA = a.map(() => true), ownB = b.map(() => true);
	for (let i = 0, j = 0; i < a.length && j < b.length;) {
		if (a[i] === b[j]) [ownA[i++], ownB[j++]] = [false, false];
		else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
		else j += 1;
	}
	return [ownA, ownB];
}

/** Marks the differences of two elements' texts, and returns a sentence about them. */
export function markDifferences(elements) {
	const [one, other] = elements.map((element) => element.textContent);
	if (one === other) return `Both runs are the same: ${many(one.length, "character")}.`;
	const { parts, same, differing } = compare(one, other);
	elements.forEach((element, index) => element.replaceChildren(...parts[index].map(([text, isOwn]) => (isOwn ? el("mark", {}, text) : text))));
	return `The same for the first ${many(same, "word")}; ${many(differing, "word")} differ, underlined above.`;
}
