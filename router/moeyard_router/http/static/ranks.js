// The tiles, and one card per rank.
import { amount, byId, make, percent, rankColor, seconds, secondsText } from "./format.js";

const MINUTE = 60, RATE_SPAN = 5, SPARK_POINTS = 60;
const SVG = "http://www.w3.org/2000/svg";

function tile(id, [number, unit], under) {
  const [, value, note] = byId(id).children;
  value.replaceChildren(number, ...(unit ? [make("small", { text: unit })] : []));
  note.textContent = under;
}

export function showTiles(history) {
  const live = history.latest, totals = live.totals;
  const output = history.rate((s) => s.counters.output_tokens, RATE_SPAN);
  const prompt = history.rate((s) => s.totals.prefill_tokens, RATE_SPAN);
  tile("tile-output", [amount(output), "tokens/s"], prompt == null ? "" : `prompts ${amount(prompt)}/s`);
  for (const [id, name] of [["tile-ttft", "time_to_first_token_seconds"], ["tile-tpot", "time_per_output_token_seconds"]]) {
    const found = history.quantiles(name, [0.5, 0.95], MINUTE);
    tile(id, found ? seconds(found[0]) : ["–", ""], found ? `p95 ${secondsText(found[1])}` : "none in a minute");
  }
  const drafts = history.growth((s) => s.totals.draft_tokens, MINUTE), kept = history.growth((s) => s.totals.accepted_tokens, MINUTE);
  if (drafts > 0) byId("tile-tpot").children[2].textContent += `, ${percent(kept / drafts)} % of drafts kept`;
  tile("tile-requests", [amount(totals.num_running), ""], totals.num_waiting == null ? "" : `${amount(totals.num_waiting)} waiting`);
  const pages = live.workers.reduce((sum, w) => sum + (w.snapshot?.kv_pages_total ?? 0), 0);
  tile("tile-kv", [percent(totals.kv_usage), "%"], pages ? `of ${amount(pages)} pages` : "");
  const hits = history.growth((s) => s.totals.expert_hits, MINUTE), misses = history.growth((s) => s.totals.expert_misses, MINUTE);
  const known = hits != null && misses != null && hits + misses > 0;
  tile("tile-experts", [known ? percent(hits / (hits + misses)) : "–", known ? "%" : ""],
    known ? `${amount(misses)} misses` : "none in a minute");
}

export function showRanks(history) {
  const workers = history.latest.workers, box = byId("rank-cards");
  byId("ranks-hint").textContent = `${workers.filter((w) => w.state === "ready").length} of ${workers.length} ready, every step needs all of them`;
  if (box.children.length !== workers.length || !box.firstElementChild?.dataset.rank) {
    box.replaceChildren(...workers.map((worker) => card(worker.rank)));
  }
  workers.forEach((worker, i) => fill(box.children[i], worker, i, history));
}

function card(rank) {
  const box = make("article", { class: "card rank", "data-rank": rank, "aria-label": `Rank ${rank}` });
  box.style.setProperty("--own", `var(${rankColor(rank)})`);
  const spark = document.createElementNS(SVG, "svg");
  spark.setAttribute("viewBox", "0 0 128 34");
  spark.setAttribute("aria-hidden", "true");
  for (const kind of ["area", "line"]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", kind);
    spark.append(path);
  }
  box.append(
    make("header", {}, make("h3", { text: `Rank ${rank}` }), make("span", { class: "grow" }), make("span", { class: "pill" })),
    make("div", { class: "rate" }, make("b"), spark),
    make("div", { class: "meter", role: "img" }, make("i")),
    make("dl"),
    make("p", { class: "where" }),
  );
  return box;
}

function fill(box, worker, index, history) {
  const snapshot = worker.snapshot, tokens = (s) => s.workers[index]?.snapshot?.generation_tokens;
  const shown = worker.draining && worker.state === "ready" ? "draining" : worker.state;
  const state = { ready: "ready", failed: "failed" }[shown] ?? "warming";
  box.classList.toggle("failed", state === "failed");
  const pill = box.querySelector(".pill");
  pill.className = `pill ${state}`;
  pill.textContent = shown;
  const rate = history.rate(tokens, RATE_SPAN);
  box.querySelector("b").replaceChildren(amount(rate), " ", make("small", { text: "tokens/s" }));
  drawSpark(box.querySelector("svg"), history, tokens);
  const meter = box.querySelector(".meter");
  meter.firstChild.style.width = `${100 * (worker.kv_usage ?? 0)}%`;
  meter.setAttribute("aria-label", `KV cache ${percent(worker.kv_usage)} %`);
  const hits = snapshot?.expert_hits, misses = snapshot?.expert_misses;
  const steps = history.rate((s) => s.workers[index]?.snapshot?.step, RATE_SPAN);
  const rows = [
    ["KV cache", `${percent(worker.kv_usage)} %`],
    ["Running, waiting", snapshot ? `${amount(snapshot.num_running)}, ${amount(snapshot.num_waiting)}` : "–"],
    ["Steps", steps == null ? "–" : `${amount(steps)} /s`],
    ["Expert hits, since start", hits == null || hits + misses === 0 ? "–" : `${percent(hits / (hits + misses))} %`],
    ["Prefix hits, since start", snapshot?.prefix_query_tokens ? `${percent(snapshot.prefix_hit_tokens / snapshot.prefix_query_tokens)} %` : "–"],
  ];
  box.querySelector("dl").replaceChildren(...rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]));
  const where = box.querySelector(".where");
  where.textContent = snapshot?.failure ?? worker.endpoint;
  where.title = where.textContent;
}

function drawSpark(svg, history, pick) {
  const last = history.samples.length - 1, first = Math.max(1, last - SPARK_POINTS + 1), points = [];
  for (let at = first; at <= last; at++) points.push(history.rate(pick, 3, at) ?? 0);
  const top = Math.max(1, ...points), x = (i) => 128 - (points.length - 1 - i) * (128 / (SPARK_POINTS - 1));
  const line = points.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${(32 - (30 * value) / top).toFixed(1)}`).join("");
  const [area, stroke] = svg.children;
  stroke.setAttribute("d", line);
  area.setAttribute("d", points.length > 1 ? `${line}L128 34L${x(0).toFixed(1)} 34Z` : "");
}
