/** Where two texts differ, word by word. */

import { el, many } from "./words.js";

const WORDS_MAX = 1500; // on each side; a table of their product is what finding the common ones takes

/** Returns [parts of one, parts of other], each part [text, isOwn], and how many words are one side's own. */
export function compare(one, other) {
	const left = one.match(/\s+|\S+/g) ?? [], right = other.match(/\s+|\S+/g) ?? [];
	let start = 0, end = 0;
	while (start < left.length && start < right.length && left[start] === right[start]) start += 1;
	while (end < left.length - start && end < right.length - start && left.at(-1 - end) === right.at(-1 - end)) end += 1;
	const a = left.slice(start, left.length - end), b = right.slice(start, right.length - end);
	const [ownA, ownB] = a.length > WORDS_MAX || b.length > WORDS_MAX ? [a.map(() => true), b.map(() => true)] : own(a, b);
	const parts = (words, marks) => {
		const made = [[words.slice(0, start).join(""), false]];
		for (let index = start; index < words.length - end; index += 1) {
			const isOwn = marks[index - start], last = made.at(-1);
			if (last[1] === isOwn) last[0] += words[index];
			else made.push([words[index], isOwn]);
		}
		made.push([words.slice(words.length - end).join(""), false]);
		return made.filter(([text]) => text);
	};
	const counted = (words, marks) => words.filter((word, index) => marks[index] && word.trim()).length;
	return { parts: [parts(left, ownA), parts(right, ownB)], same: start, own: Math.max(counted(a, ownA), counted(b, ownB)) };
}

/** Which words of each are in no longest common subsequence. */
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

/** Marks two elements' texts where they differ; returns the sentence that says how. */
export function markDifferences(elements) {
	const [one, other] = elements.map((element) => element.textContent);
	if (one === other) return `Both runs are the same: ${many(one.length, "character")}.`;
	const { parts, same, own: differing } = compare(one, other);
	elements.forEach((element, index) => element.replaceChildren(...parts[index].map(([text, isOwn]) => (isOwn ? el("mark", {}, text) : text))));
	const words = Math.ceil(same / 2);
	return `The same for the first ${many(words, "word")}; ${many(differing, "word")} differ, underlined above.`;
}
