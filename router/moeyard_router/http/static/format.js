// Numbers as people read them, and elements without markup in strings (the page's policy allows no inline script).

const NONE = "–";

/** Seconds as [number, unit]. */
export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return [NONE, ""];
  if (value === 0) return ["0", "ms"];
  if (value >= 99.95) return [value.toFixed(0), "s"];
  if (value >= 0.9995) return [value.toFixed(2), "s"];
  const ms = value * 1000;
  return [ms >= 99.5 ? ms.toFixed(0) : ms >= 9.95 ? ms.toFixed(1) : ms.toFixed(2), "ms"];
}

export const secondsText = (value) => seconds(value).join(" ").trim();

/** A rate or count: one decimal below 100, thousands apart above. */
export function amount(value) {
  if (value == null || !Number.isFinite(value)) return NONE;
  if (value !== 0 && Math.abs(value) < 99.95 && !Number.isInteger(value)) return value.toFixed(1);
  return Math.round(value).toLocaleString("en");
}

export function percent(value) {
  if (value == null || !Number.isFinite(value)) return NONE;
  const hundred = value * 100;
  return hundred > 0 && hundred < 9.95 ? hundred.toFixed(1) : hundred > 99 && hundred < 100 ? hundred.toFixed(2) : hundred.toFixed(0);
}

/** An element: attributes by name, `class` and `text` included; further arguments are children. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const rankColor = (rank) => `--c${rank % 8}`;

/** Calls of this page, with the key that its reader has typed in. Throws an Error with `status` for an answer that is no 200. */
export async function call(path, options = {}) {
  const key = sessionStorage.getItem("moeyard-key");
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { cache: "no-store", ...options, headers });
  if (answer.ok) return answer;
  let said = `${answer.status} ${answer.statusText}`;
  try {
    said = (await answer.json()).error.message;
  } catch { /* not JSON: the status must do */ }
  throw Object.assign(new Error(said), { status: answer.status });
}
