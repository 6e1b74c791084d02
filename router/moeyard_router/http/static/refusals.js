// Refused requests: how many for each reason, and the latest ones with their sizes.
import { amount, byId, bytes, clock, keyed, make, secondsText } from "./format.js";

const MINUTE = 60;
const WHY = {
  queue_full: "the places and queues of the fleet are full",
  queue_timeout: "waited too long for a start",
  overload: "would have waited too long, so it was refused at once",
  busy: "too many bytes of bodies are being read at once",
  too_large: "the body is larger than the limit",
  prompt_too_long: "prompt and output exceed the model's limit",
  never_fits: "needs more KV pages than a rank has",
  bad_request: "a field is wrong; the answer names it",
  duplicate: "has the id of a request that runs",
  unknown_model: "names a model that is not served here",
  intake: "the process that read the body has ended",
  not_ready: "the fleet starts, or the router stops",
  fleet_failed: "the fleet has failed",
  no_key: "has no API key",
  bad_key: "has an unknown API key",
  foreign_origin: "comes from a web page that is not allowed",
  foreign_host: "names another host",
  not_json: "is not declared as JSON",
};

export function showRefusals(history, refusals) {
  const reasons = Object.entries(history.latest.counters.rejections ?? {}).filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
  byId("refusals-empty").hidden = reasons.length > 0;
  byId("refusals-table").hidden = reasons.length === 0;
  const rows = reasons.map(([reason, count]) => ({
    reason,
    count,
    minute: history.growth((s) => s.counters.rejections?.[reason], MINUTE),
    latest: refusals.filter((each) => each.reason === reason),
  }));
  keyed(byId("refusals-body"), rows, (each) => each.reason, create, fill);
}

function create({ reason }) {
  const cell = (label) => make("td", { "data-label": label });
  return make("tr", {}, make("th", { scope: "row" }, make("code", { text: reason }), " ", make("small", { text: WHY[reason] ?? "" })),
    cell("Since start"), cell("Last minute"), cell("Latest"));
}

function fill(row, { reason, count, minute, latest }) {
  const [, total, recent, last] = row.children;
  total.textContent = amount(count);
  recent.textContent = amount(minute);
  const text = JSON.stringify(latest);
  if (last.shown === text) return;
  last.shown = text;
  const open = last.firstElementChild?.open;
  if (!latest.length) {
    last.replaceChildren("–");
    return;
  }
  const list = make("ul", {}, ...latest.map((each) => make("li", {}, make("b", { text: clock(each.when) }), ` ${described(each)}`)));
  const summary = make("summary", { text: clock(latest[0].when), "aria-label": `${clock(latest[0].when)}: show the latest requests refused for ${reason}` });
  // Replace the list only, so that an open fold keeps its focus.
  if (open === undefined) last.replaceChildren(make("details", {}, summary, list));
  else last.firstElementChild.replaceChild(list, last.firstElementChild.lastElementChild);
  last.firstElementChild.firstElementChild.textContent = clock(latest[0].when);
}

function described(refusal) {
  const parts = [`${refusal.status} ${refusal.path}`];
  if (refusal.prompt_tokens != null) parts.push(`${amount(refusal.prompt_tokens)} prompt tokens`);
  if (refusal.max_tokens != null) parts.push(`max ${amount(refusal.max_tokens)}`);
  if (refusal.choices > 1) parts.push(`${amount(refusal.choices)} choices`);
  if (refusal.body_bytes != null) parts.push(`body of ${bytes(refusal.body_bytes)}`);
  if (refusal.retry_after != null) parts.push(`retry after ${secondsText(refusal.retry_after)}`);
  return parts.join(", ") + (refusal.message ? `: ${refusal.message}` : "");
}
