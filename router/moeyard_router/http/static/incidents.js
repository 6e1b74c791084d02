// The latest incidents. Each can be opened: what was lost, what was recovered, how long it took, what survivors did.
import { amount, byId, call, clock, facts, keyed, make, secondsText } from "./format.js";

const EVERY = 4000;

export class Incidents {
  constructor() {
    this.visible = false;
    new IntersectionObserver((entries) => { this.visible = entries.at(-1).isIntersecting; }).observe(byId("incidents"));
  }

  /** Ask for the incidents while the section is visible, and whenever the fleet's state has changed. */
  async poll(live) {
    const state = `${live.generation} ${live.unready}`;
    if (state === this.state && (!this.visible || performance.now() - this.asked < EVERY)) return;
    this.state = state;
    this.asked = performance.now();
    this.show((await (await call("v1/fleet/incidents")).json()).incidents);
  }

  show(incidents) {
    byId("incidents-empty").hidden = incidents.length > 0;
    const planned = incidents.filter((each) => each.planned).length;
    byId("incidents-hint").textContent = incidents.length ? `${incidents.length} in all, ${planned} planned; the newest first` : "";
    keyed(byId("incidents-list"), incidents, (each) => each.when, create, fill);
  }
}

function create() {
  return make("details", { class: "fold" }, make("summary"), make("div", { class: "inside" }));
}

function fill(box, incident) {
  // An unchanged incident keeps its elements, with the focus and the folds that the reader has opened.
  const text = JSON.stringify(incident);
  if (box.shown === text) return;
  box.shown = text;
  const kind = { recovered: "ready", failed: "failed" }[incident.state] ?? "warming";
  const cost = incident.seconds_until_whole == null ? "" : `whole after ${secondsText(incident.seconds_until_whole)}`;
  box.firstElementChild.replaceChildren(
    make("span", { class: "when", text: clock(incident.when) }),
    make("span", { class: `pill ${kind}`, text: incident.planned ? `${incident.state}, planned` : incident.state }),
    make("span", { class: "what", text: incident.launcher?.reason ?? incident.reason }),
    make("span", { class: "cost", text: cost }));
  box.lastElementChild.replaceChildren(...forensics(incident));
}

function forensics(incident) {
  const { launcher } = incident;
  const found = [facts([
    ["Began", new Date(incident.when * 1000).toLocaleString("en-GB")],
    ["First report", incident.reason],
    ["Agreed reason", launcher?.reason],
    ["Lost ranks", incident.ranks.join(", ") || "none"],
    ["Until all ranks were ready", secondsText(incident.seconds_until_whole)],
    ["Until the next token", secondsText(incident.seconds_until_output)],
    ["Sequences that went on elsewhere", amount(incident.requests_carried)],
    ["Tokens computed again", amount(incident.tokens_recomputed)],
    ["Failure", incident.failure],
  ])];
  if (launcher?.lost?.length) {
    found.push(table("Lost processes", ["Rank", "Reason", "Process"], launcher.lost.map((each) => [each.rank, each.reason, each.process ?? "–"])));
  }
  const parts = Object.entries(launcher?.parts ?? {}).map(([name, seconds]) => [name, secondsText(seconds)]);
  if (parts.length) found.push(table("Phases of the recovery", ["Phase", "Time"], parts));
  for (const report of launcher?.reports ?? []) found.push(survivor(report));
  if (incident.reports.length) {
    found.push(table("Reports in order", ["After", "Report"], incident.reports.map((each) => [secondsText(each.seconds), each.reason])));
  }
  return found;
}

function survivor(report) {
  const box = make("section", {}, make("h3", { text: `Rank ${report.rank} survived` }), facts([
    ["Step", amount(report.step)],
    ["Place", report.place],
    ["Running, waiting", `${amount(report.running)}, ${amount(report.waiting)}`],
    ["Latest requests", report.latest?.join(", ")],
  ]));
  if (report.stack?.length) {
    box.append(make("details", { class: "stack" }, make("summary", { text: "Stack, the innermost call last" }),
      make("ol", {}, ...report.stack.map((call) => make("li", { text: call })))));
  }
  return box;
}

function table(title, heads, rows) {
  return make("table", { class: "plain" }, make("caption", { text: title }),
    make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col", text })))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((text) => make("td", { text }))))));
}
