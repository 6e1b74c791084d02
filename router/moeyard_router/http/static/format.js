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

/** Call the router with the key that was typed in. Throws an Error with `status`, 0 without an answer, unless it is a 200. */
export async function call(path, options = {}) {
  const key = sessionStorage.getItem("moeyard-key");
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { cache: "no-store", ...options, headers }).catch((error) => {
    throw Object.assign(error, { status: 0 });
  });
  if (answer.ok) return answer;
  let said = `${answer.status} ${answer.statusText}`;
  try {
    said = (await answer.json()).error.message;
  } catch { /* not JSON: the status must do */ }
  throw Object.assign(new Error(said), { status: answer.status });
}

/** A time of the day. `unix`: seconds. */
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

/** Bytes with a binary unit. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${amount(value)} ${units[at]}`;
}

/** A list of names and values, without the values that are unknown. */
export function facts(rows) {
  const known = rows.filter(([, value]) => value != null && value !== "");
  return make("dl", { class: "facts" }, ...known.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }))));
}

/**
 * Show `items` as children of `parent`, one element per key. Elements stay while their keys do, so that focus and open
 * folds survive an update. Children without a key stay in front.
 */
export function keyed(parent, items, key, create, fill) {
  const old = new Map([...parent.children].filter((each) => each.dataset.key !== undefined).map((each) => [each.dataset.key, each]));
  const wanted = new Set(items.map((item) => String(key(item))));
  for (const [name, element] of old) if (!wanted.has(name)) element.remove();
  let next = [...parent.children].find((each) => each.dataset.key !== undefined) ?? null;
  for (const item of items) {
    const name = String(key(item));
    let element = old.get(name);
    if (!element) {
      element = create(item);
      element.dataset.key = name;
    }
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
    fill(element, item);
  }
}
