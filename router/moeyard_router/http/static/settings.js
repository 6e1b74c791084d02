// The effective settings, each with the source of its value.
import { byId, bytes, call, keyed, make } from "./format.js";

const EVERY = 30000;

export class Settings {
  constructor() {
    this.visible = false;
    this.answer = null;
    new IntersectionObserver((entries) => { this.visible = entries.at(-1).isIntersecting; }).observe(byId("settings"));
    byId("settings-find").addEventListener("input", () => this.show());
    byId("settings-all").addEventListener("change", () => this.show());
  }

  /** Ask while the section is visible, seldom: settings change by `moeyard restart` and `scale` only. */
  async poll(live) {
    if (!this.visible || (live.generation === this.generation && performance.now() - this.asked < EVERY)) return;
    this.generation = live.generation;
    this.asked = performance.now();
    this.answer = await (await call("v1/fleet/config")).json();
    this.show();
  }

  show() {
    if (!this.answer) return;
    const { settings, changed, version } = this.answer;
    const wanted = byId("settings-find").value.trim().toLowerCase(), all = byId("settings-all").checked;
    const own = (each) => each.source !== "default" || changed.some(({ name }) => name === each.name);
    const found = settings.filter((each) => (all || wanted || own(each)) && [each.name, each.group, each.source].some((text) => text.toLowerCase().includes(wanted)));
    byId("settings-hint").textContent = `moeyard ${version}: ${found.length} of ${settings.length} settings shown`;
    byId("settings-empty").hidden = found.length > 0;
    byId("settings-empty").textContent = settings.length ? "No setting matches." : "This server was not started by moeyard serve.";
    byId("settings-table").hidden = found.length === 0;
    const groups = [...new Set(found.map((each) => each.group))].map((group) => ({ group, settings: found.filter((each) => each.group === group) }));
    keyed(byId("settings-table"), groups, (each) => each.group, () => make("tbody"), (body, { group, settings: own }) => {
      body.replaceChildren(make("tr", { class: "group" }, make("th", { colspan: 3, scope: "rowgroup", text: group })),
        ...own.map((each) => row(each, changed)));
    });
  }
}

function row({ name, value, source, why }, changed) {
  const cell = make("td", {}, make("span", { text: shown(value) }));
  for (const each of changed) {
    const text = name.endsWith("-memory") ? bytes(each.value) : shown(each.value);
    if (each.name === name) cell.append(make("small", { text: `rank ${each.rank}: ${text}, since its restart` }));
  }
  const from = make("td", {}, make("span", { class: `source ${source.replace(" ", "-")}`, text: source }));
  if (why) from.append(make("small", { text: why }));
  return make("tr", {}, make("th", { scope: "row", text: name }), cell, from);
}

function shown(value) {
  if (value == null || value === "" || (Array.isArray(value) && !value.length)) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value === "object") return Object.entries(value).map(([key, each]) => `${key} ${shown(each)}`).join(", ");
  return String(value);
}
