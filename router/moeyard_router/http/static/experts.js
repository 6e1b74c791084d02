// Rows by layer and expert as a heat map: how far each expert is from the mean of its layer, now and in the last minutes.
import { amount, byId, call, clock, color, make, percent } from "./format.js";
import { KEPT_SECONDS } from "./history.js";

// `STRIDE`: seconds between two kept answers. `BUSIEST`: rows of the table of experts.
const EVERY = 3000, MINUTE = 60, STRIDE = 10, BUSIEST = 10, LEFT = 34, TOP = 20, AXIS = 16;

export class Experts {
  constructor() {
    this.samples = [];
    this.visible = false;
    this.cell = null;
    this.pinned = null;  // Unix time of the end of the shown span; null follows the present
    this.canvas = byId("heat-map");
    this.strip = byId("heat-strip");
    this.slider = byId("heat-time");
    this.slider.min = -KEPT_SECONDS;
    this.slider.step = STRIDE;
    this.slider.addEventListener("input", () => this.pin(this.samples.at(-1)?.time + Number(this.slider.value)));
    this.strip.addEventListener("pointerdown", (event) => this.pin(this.timeAt(event.offsetX)));
    byId("heat-now").addEventListener("click", () => this.pin(null));
    new IntersectionObserver((entries) => { this.visible = entries.at(-1).isIntersecting; }).observe(byId("experts"));
    new ResizeObserver(() => this.draw()).observe(byId("heat"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    document.querySelectorAll("input[name=span]").forEach((input) => input.addEventListener("change", () => this.draw()));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  /** Ask often while the section is visible, and for the history otherwise. */
  async poll() {
    const every = this.visible ? EVERY : STRIDE * 1000;
    if (this.asked && performance.now() - this.asked < every) return;
    this.asked = performance.now();
    const answer = await (await call("v1/fleet/experts")).json();
    if (this.samples.length && this.samples[0].generation !== answer.generation) Object.assign(this, { samples: [], pinned: null });
    const before = this.samples.at(-2);
    if (before && answer.time - before.time < STRIDE) this.samples.pop();
    this.samples.push(answer);
    // The oldest answer is one that the first minute of the history can be compared with.
    while (this.samples.length > 2 && this.samples[1].time <= answer.time - KEPT_SECONDS - MINUTE) this.samples.shift();
    this.draw();
  }

  /** Show the span that ends at a time, or at present for null. */
  pin(time) {
    const latest = this.samples.at(-1)?.time;
    if (latest === undefined) return;
    this.pinned = time === null || time > latest - STRIDE / 2 ? null : Math.max(time, this.samples[0].time);
    this.draw();
  }

  /** The newest of the answers up to a time, or the oldest of all. */
  sampleAt(time) {
    return this.samples.findLast((each) => each.time <= time) ?? this.samples[0];
  }

  /** Rows by layer and expert of the chosen span, the owner of each column, and the layers' numbers. */
  table() {
    const now = this.pinned === null ? this.samples.at(-1) : this.sampleAt(this.pinned + 1);
    const since = document.querySelector("input[name=span]:checked").value === "start";
    return now ? counted(now, since ? null : this.sampleAt(now.time - MINUTE + 1)) : null;
  }

  draw() {
    this.showTime();
    const table = this.table(), empty = byId("heat-empty");
    const total = table ? table.rows.flat().reduce((a, b) => a + b, 0) : 0;
    // The history stays in view when the shown span is empty.
    const known = total || this.samples.at(-1)?.ranks.some((rank) => rank.rows.flat().some((count) => count > 0));
    byId("heat-body").hidden = !known;
    byId("heat-cells").hidden = !total;
    empty.hidden = Boolean(total);
    if (!total) {
      const told = this.samples.at(-1)?.ranks.length;
      empty.textContent = !this.samples.length ? "Asking the ranks." : table ? "No rows in this span." : told
        ? "No rows counted yet. They begin with the first request."
        : "No rank has answered.";
      this.current = null;
    } else {
      this.current = table;
      this.relative = relative(table.rows);
      this.top = Math.max(2, Math.ceil(Math.max(...this.relative.flat())));
      this.paint();
      this.summary(table);
      if (this.cell) this.tell();
    }
    if (known) this.paintStrip();
  }

  /** The slider, and the end of the shown span as text. */
  showTime() {
    const latest = this.samples.at(-1)?.time;
    if (this.pinned !== null) this.pinned = Math.max(this.pinned, latest - KEPT_SECONDS);
    const back = this.pinned === null ? 0 : Math.round((latest - this.pinned) / STRIDE) * STRIDE;
    const text = back ? `${Math.floor(back / 60)} min ${back % 60} s ago` : "now";
    this.slider.value = -back;
    this.slider.setAttribute("aria-valuetext", text);
    byId("heat-until").textContent = back ? `until ${clock(this.pinned)}, ${text}` : "until now";
    byId("heat-now").disabled = !back;
  }

  timeAt(x) {
    return this.samples.at(-1)?.time - KEPT_SECONDS * (1 - (x - LEFT) / (this.strip.clientWidth - LEFT));
  }

  /** The busiest expert of each layer over the mean, for each part of the last minutes. */
  paintStrip() {
    const { strip, samples } = this, ratio = devicePixelRatio || 1, width = strip.clientWidth, latest = samples.at(-1).time;
    const layers = (samples.findLast((each) => each.ranks.some((rank) => rank.rows.length))?.ranks.find((rank) => rank.rows.length)?.layers) ?? [];
    const cellHeight = Math.max(3, Math.min(12, 140 / Math.max(1, layers.length))), bottom = cellHeight * layers.length;
    strip.width = width * ratio;
    strip.height = (bottom + AXIS) * ratio;
    strip.style.height = `${bottom + AXIS}px`;
    const ink = strip.getContext("2d"), shade = shades(), scale = (width - LEFT) / KEPT_SECONDS;
    ink.scale(ratio, ratio);
    ink.font = "11px system-ui, sans-serif";
    ink.textBaseline = "middle";
    let most = null, columns = 0;
    const x = (time) => LEFT + (KEPT_SECONDS - (latest - time)) * scale;
    const tops = samples.slice(1).map((sample, i) => busiest(sample, samples[i]));
    const top = Math.max(2, Math.ceil(Math.max(...tops.flatMap((each) => each ?? [0]))));
    samples.slice(1).forEach((sample, i) => {
      if (!tops[i] || x(sample.time) <= LEFT) return;
      columns++;
      const left = Math.max(LEFT, x(samples[i].time));
      tops[i].forEach((value, l) => {
        if (value && (!most || value > most.value)) most = { value, layer: layers[l], time: sample.time };
        ink.fillStyle = shade(value / top);
        ink.fillRect(left, l * cellHeight, x(sample.time) - left - 1, cellHeight - (cellHeight > 6 ? 1 : 0));
      });
    });
    ink.fillStyle = color("--muted");
    ink.textAlign = "right";
    const every = Math.ceil(14 / cellHeight);
    layers.forEach((layer, l) => { if (l % every === 0) ink.fillText(layer, LEFT - 8, (l + 0.5) * cellHeight); });
    [[0, "right", "now"], [KEPT_SECONDS / 2, "center", `${KEPT_SECONDS / 120} min ago`], [KEPT_SECONDS, "left", `${KEPT_SECONDS / 60} min ago`]].forEach(([ago, align, text]) => {
      ink.textAlign = align;
      ink.fillText(text, x(latest - ago), bottom + AXIS / 2 + 1);
    });
    if (this.pinned !== null) {
      ink.fillStyle = color("--text");
      ink.fillRect(x(this.pinned) - 1, 0, 2, bottom);
    }
    const text = most ? `The highest was ${most.value.toFixed(1)} × the mean, in layer ${most.layer} until ${clock(most.time)}.` : "No rows in this time.";
    strip.setAttribute("aria-label", `Busiest expert of each layer over the last minutes. ${text}`);
    byId("heat-strip-text").textContent = columns ? `Busiest expert of each layer. ${text}` : "Drawn while this page is open.";
  }

  paint() {
    const { canvas, current } = this, ratio = devicePixelRatio || 1, width = canvas.clientWidth, columns = current.owners.length;
    const cellHeight = Math.max(6, Math.min(22, 260 / current.layers.length)), height = TOP + cellHeight * current.layers.length;
    const cellWidth = (width - LEFT) / columns, gap = cellWidth > 6 ? 1 : 0;
    Object.assign(this, { cellHeight, cellWidth });
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const ink = canvas.getContext("2d"), shade = shades();
    ink.scale(ratio, ratio);
    ink.font = "11px system-ui, sans-serif";
    ink.textBaseline = "middle";
    const every = Math.ceil(14 / cellHeight);
    current.layers.forEach((layer, l) => {
      ink.fillStyle = color("--muted");
      ink.textAlign = "right";
      if (l % every === 0) ink.fillText(layer, LEFT - 8, TOP + (l + 0.5) * cellHeight);
      this.relative[l].forEach((value, e) => {
        ink.fillStyle = shade(value / this.top);
        ink.fillRect(LEFT + e * cellWidth, TOP + l * cellHeight, cellWidth - gap, cellHeight - (cellHeight > 8 ? 1 : 0));
      });
    });
    ink.textAlign = "left";
    current.owners.forEach(({ rank }, e) => {
      if (e && current.owners[e - 1].rank === rank) return;
      ink.fillStyle = color("--muted");
      ink.fillText(`rank ${rank}`, LEFT + e * cellWidth + (e ? 5 : 0), 8);
      if (e) {
        ink.fillStyle = color("--text");
        ink.fillRect(LEFT + e * cellWidth - 1.5, 2, 1.5, height - 2);
      }
    });
    if (this.cell) {
      const [l, e] = this.cell;
      ink.strokeStyle = color("--text");
      ink.lineWidth = 1.5;
      ink.strokeRect(LEFT + e * cellWidth, TOP + l * cellHeight, Math.max(3, cellWidth - gap), cellHeight - 1);
    }
    const scale = byId("heat-scale").getContext("2d");
    for (let x = 0; x < 120; x++) {
      scale.fillStyle = shade(x / 119);
      scale.fillRect(x, 0, 1, 10);
    }
    byId("heat-top").textContent = `${this.top} × mean of the layer`;
  }

  summary(table) {
    const total = table.rows.flat().reduce((a, b) => a + b, 0);
    const lines = table.ranks.map((rank) => {
      let rows = 0, worst = [0, 0, 0];
      table.rows.forEach((row, l) => row.forEach((count, e) => {
        if (table.owners[e].rank !== rank) return;
        rows += count;
        if (this.relative[l][e] > worst[0]) worst = [this.relative[l][e], table.layers[l], table.owners[e].expert];
      }));
      const busiest = worst[0] ? `${worst[0].toFixed(1)} × mean, layer ${worst[1]} expert ${worst[2]}` : "–";
      return make("tr", {}, ...[`rank ${rank}`, amount(rows), `${percent(rows / total)} %`, busiest].map((text) => make("td", { text })));
    });
    byId("heat-ranks").tBodies[0].replaceChildren(...lines);
    const cells = table.rows.flatMap((row, l) => row.map((count, e) => ({ count, l, e, times: this.relative[l][e] })));
    byId("heat-busiest").tBodies[0].replaceChildren(...cells.sort((a, b) => b.times - a.times).slice(0, BUSIEST).map(({ count, l, e, times }) =>
      make("tr", {}, ...[table.layers[l], table.owners[e].expert, `rank ${table.owners[e].rank}`, amount(count), `${times.toFixed(2)} ×`].map((text) => make("td", { text })))));
  }

  point(event) {
    if (!this.current) return;
    const box = this.canvas.getBoundingClientRect();
    this.select(Math.floor((event.clientY - box.top - TOP) / this.cellHeight), Math.floor((event.clientX - box.left - LEFT) / this.cellWidth));
  }

  move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.current) return;
    event.preventDefault();
    const [l, e] = this.cell ?? [-step[0], -step[1]];
    this.select(l + step[0], e + step[1]);
  }

  select(l, e) {
    if (!(l in this.current.layers) || !(e in this.current.owners)) return;
    this.cell = [l, e];
    this.paint();
    this.tell();
  }

  tell() {
    const [l, e] = this.cell, table = this.current;
    if (!(l in table.layers) || !(e in table.owners)) return;
    const { rank, expert } = table.owners[e];
    byId("heat-cell").textContent = `Layer ${table.layers[l]}, expert ${expert} on rank ${rank}: ${amount(table.rows[l][e])} rows, ${this.relative[l][e].toFixed(2)} × the layer's mean`;
  }
}

/** The rows of a span as a table: what `now` has counted since `old` (null: since the start). Null without any rank. */
function counted(now, old) {
  const ranks = now.ranks.filter((each) => each.rows.length);
  if (!ranks.length) return null;
  const owners = ranks.flatMap((each) => each.rows[0].map((_, i) => ({ rank: each.rank, expert: each.experts[i] })));
  const rows = ranks[0].layers.map((_, l) => ranks.flatMap((each) => {
    const past = old?.ranks.find((o) => o.rank === each.rank)?.rows[l];
    // On a GPU the choices of a silent rank are missing from all ranks' rows, so an answer may be below an earlier one.
    return each.rows[l].map((count, i) => Math.max(0, count - (past?.[i] ?? 0)));
  }));
  return { layers: ranks[0].layers, owners, rows, ranks: ranks.map((each) => each.rank) };
}

/** Each count over the mean of its layer; 0 in a layer without rows. */
function relative(rows) {
  return rows.map((row) => {
    const mean = row.reduce((a, b) => a + b, 0) / row.length;
    return row.map((count) => (mean ? count / mean : 0));
  });
}

/** The busiest expert of each layer over the mean between two answers; null without rows. Kept with the later answer. */
function busiest(now, old) {
  if (now.since !== old.time) {
    const table = counted(now, old), tops = table && relative(table.rows).map((row) => Math.max(...row));
    Object.assign(now, { since: old.time, tops: tops?.some((value) => value > 0) ? tops : null });
  }
  return now.tops;
}

/** A colour for 0 to 1, through three of the page's own. */
function shades() {
  const stops = ["--heat-0", "--heat-1", "--heat-2"].map((name) => color(name).match(/[0-9a-f]{2}/gi).map((pair) => parseInt(pair, 16)));
  return (value) => {
    const at = Math.min(1, Math.max(0, value)) * 2, i = Math.min(1, Math.floor(at));
    return `rgb(${stops[i].map((from, c) => Math.round(from + (stops[i + 1][c] - from) * (at - i))).join(" ")})`;
  };
}
