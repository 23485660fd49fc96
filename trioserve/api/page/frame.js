/** The frame of every page: connection state, API key and colours. */

import { key } from "./asking.js";
import { find, on, show, write } from "./words.js";

// --- connection and key ---

/** kind: "connecting", "live", "lost", "paused" or "key". */
export function showStatus(kind, text) {
	const status = find("status");
	status.dataset.kind = kind;
	write(status, text);
	document.body.classList.toggle("stale", kind === "lost");
}

/** why: reason to ask for a key. null: no key is missing. */
export function showKey(why) {
	show(find("key-button"), key.isSet || why !== null);
	if (why === null) return;
	write(find("key-error"), key.isSet ? why : "");
	key.set(null);
	openKeyDialog();
}

function openKeyDialog() {
	if (!find("key-dialog").open) find("key-dialog").showModal();
	find("key-input").focus();
}

/** listener: called when somebody has typed one. */
export function whenKeyIsSet(listener) {
	on("key-button", { click: openKeyDialog });
	on("key-form", { submit: (event) => {
		event.preventDefault();
		key.set(find("key-input").value.trim());
		find("key-input").value = "";
		find("key-dialog").close();
		listener();
	} });
}

// --- colours ---

const THEME = "trioserve-theme";
const theme = find("theme");

/** listener: called at once and after changes of colours. */
export function whenThemeChanges(listener) {
	const showTheme = () => {
		if (theme.value) document.documentElement.dataset.theme = theme.value;
		else delete document.documentElement.dataset.theme;
		listener();
	};
	theme.value = localStorage.getItem(THEME) ?? "";
	on(theme, { change: () => {
		localStorage.setItem(THEME, theme.value);
		showTheme();
	} });
	on(matchMedia("(prefers-color-scheme: dark)"), { change: showTheme });
	showTheme();
}
