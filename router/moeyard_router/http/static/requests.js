// The table of the latest requests. Each row opens a timeline: when each phase began, how long it took, what it waited for.
import { amount, byId, clock, keyed, make, percent, secondsText } from "./format.js";

const SHOWN = 16;
const ENDS = { stop: "stop", length: "length", abort: "left", error: "failed" };
const NAMES = { router: "router", queue: "queue", prefill: "prefill", first: "to first token", decode: "decode", rest: "rest",
  lockstep: "waits for peers", fetch: "waits for expert weights" };

export function showRequests(requests) {
  byId("requests-empty").hidden = requests.length > 0;
  byId("requests-table").hidden = requests.length === 0;
  const shown = requests.slice(0, SHOWN), longest = Math.max(...shown.map((r) => r.total));
  keyed(byId("requests-table"), shown, (r) => `${r.id} ${r.index}`, create, (body, r) => {
    body.querySelector(".bar").replaceChildren(bar(phases(r), longest));
  });
}

/** A body of two rows: the request, and its timeline, which a button opens. Ended requests never change. */
function create(r) {
  const cell = (label, text, small) => make("td", { ...(label ? { "data-label": label } : {}), text }, ...(small ? [make("small", { text: small })] : []));
  const tpot = r.output_tokens > 1 && r.decode != null ? r.decode / (r.output_tokens - 1) : null;
  const end = cell("", ENDS[r.reason] ?? r.reason);
  if (r.reason === "error") end.className = "bad";
  const time = clock(r.ended), name = `timeline-${r.id}-${r.index}`;
  const button = make("button", { type: "button", class: "open", "aria-expanded": "false", "aria-controls": name, text: time,
    "aria-label": `Timeline of the ${r.kind} that ended at ${time}` });
  const row = make("tr", { title: `${r.id}, choice ${r.index}` },
    make("td", {}, button),
    cell("", r.kind, r.rank == null ? "" : ` rank ${r.rank}`),
    cell("Prompt", amount(r.prompt_tokens), r.cached_tokens ? ` ${amount(r.cached_tokens)} cached` : ""),
    cell("Output", amount(r.output_tokens)),
    make("td", { class: "bar" }),
    cell("TTFT", secondsText(r.ttft)), cell("TPOT", secondsText(tpot)), cell("Total", secondsText(r.total)), end);
  const detail = make("tr", { class: "timeline", id: name }), body = make("tbody", {}, row, detail);
  detail.hidden = true;
  button.addEventListener("click", () => {
    detail.hidden = !detail.hidden;
    button.setAttribute("aria-expanded", String(!detail.hidden));
    if (!detail.children.length) detail.append(make("td", { colspan: 9 }, ...timeline(r)));
  });
  return body;
}

/** [kind, start, seconds] of each phase in order. Without the worker's times, all before the first token is one piece. */
function phases(r) {
  if (r.ttft == null) return [["rest", 0, r.total]];
  const known = r.queue != null && r.prefill > 0;
  const router = known ? Math.max(0, r.ttft - r.queue - r.prefill) : 0, decode = r.decode ?? 0;
  const before = known ? [["router", router], ["queue", r.queue], ["prefill", r.prefill]] : [["first", r.ttft]];
  let start = 0;
  return [...before, ["decode", decode], ["rest", Math.max(0, r.total - r.ttft - decode)]].map(([kind, seconds]) => {
    const found = [kind, start, seconds];
    start += seconds;
    return found;
  });
}

function bar(parts, longest) {
  const text = parts.map(([kind, , seconds]) => `${NAMES[kind]} ${secondsText(seconds)}`).join(", ");
  const box = make("div", { class: "phases", role: "img", "aria-label": text, title: text });
  for (const [kind, , seconds] of parts) {
    if (!seconds) continue;
    const piece = make("i", { class: kind });
    piece.style.width = `${(99 * seconds) / longest}%`;
    box.append(piece);
  }
  return box;
}

function timeline(r) {
  const heads = ["Phase", "From", "Time", "Share", ""].map((text) => make("th", { scope: "col", ...(text ? { text } : { "aria-hidden": "true", class: "bar" }) }));
  const parts = phases(r), [, lastStart, lastSeconds] = parts.at(-1), whole = Math.max(r.total, lastStart + lastSeconds);
  const row = (kind, start, seconds, from) => {
    const track = make("span", { class: "track" }, make("i", { class: kind }));
    track.firstChild.style.marginLeft = `${(100 * start) / whole}%`;
    track.firstChild.style.width = `max(2px, ${(100 * seconds) / whole}%)`;
    return make("tr", {}, make("th", { scope: "row", text: NAMES[kind] }),
      ...[from, secondsText(seconds), `${percent(seconds / whole)} %`].map((text) => make("td", { text })),
      make("td", { class: "bar", "aria-hidden": "true" }, track));
  };
  const rows = parts.map(([kind, start, seconds]) => row(kind, start, seconds, secondsText(start)));
  // Waits happen again and again within prefill and decode, so their bars only show sums.
  const within = parts.find(([kind]) => kind === "prefill" || kind === "first" || kind === "decode")?.[1] ?? 0;
  for (const kind of ["lockstep", "fetch"]) if (r[kind] != null) rows.push(row(kind, within, r[kind], "in all"));
  const table = make("table", { class: "plain spans" }, make("caption", { class: "hidden", text: "Phases from the request's arrival" }),
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
  const cached = r.cached_tokens == null ? "" : `; ${amount(r.cached_tokens)} prompt tokens from the cache`;
  return [table, make("p", { class: "hint", text: `${r.id}, choice ${r.index}${cached}` })];
}
