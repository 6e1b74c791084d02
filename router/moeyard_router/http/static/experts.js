// Rows by layer and expert as a heat map: how far each expert is from the mean of its layer.
import { amount, byId, call, color, make, percent } from "./format.js";

const EVERY = 3000, MINUTE = 60, LEFT = 34, TOP = 20;

export class Experts {
  constructor() {
    this.samples = [];
    this.visible = false;
    this.cell = null;
    this.canvas = byId("heat-map");
    new IntersectionObserver((entries) => { this.visible = entries.at(-1).isIntersecting; }).observe(byId("experts"));
    new ResizeObserver(() => this.draw()).observe(byId("heat"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    document.querySelectorAll("input[name=span]").forEach((input) => input.addEventListener("change", () => this.draw()));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  /** Ask, unless nobody sees the section. */
  async poll() {
    if (!this.visible || document.hidden) return;
    if (this.asked && performance.now() - this.asked < EVERY) return;
    this.asked = performance.now();
    const answer = await (await call("v1/fleet/experts")).json();
    if (this.samples.length && this.samples[0].generation !== answer.generation) this.samples = [];
    this.samples.push(answer);
    // Keep one that is a minute old, or a little more, to take the difference to.
    while (this.samples.length > 2 && this.samples[1].time <= answer.time - MINUTE) this.samples.shift();
    this.draw();
  }

  /** [layer][expert] rows of the chosen span, who owns each column, and the layers' numbers; null if nothing is known. */
  table() {
    const now = this.samples.at(-1), since = document.querySelector("input[name=span]:checked").value === "start";
    const ranks = now?.ranks.filter((each) => each.rows.length) ?? [];
    if (!ranks.length) return null;
    const old = since ? [] : this.samples[0].ranks;
    const owners = ranks.flatMap((each) => each.rows[0].map((_, i) => ({ rank: each.rank, expert: each.experts[i] })));
    const rows = ranks[0].layers.map((_, l) => ranks.flatMap((each) => {
      const past = old.find((o) => o.rank === each.rank)?.rows[l];
      // What a silent rank's rows have chosen on a GPU is missing from all: an answer may be less than one before.
      return each.rows[l].map((count, i) => Math.max(0, count - (past?.[i] ?? 0)));
    }));
    return { layers: ranks[0].layers, owners, rows, ranks: ranks.map((each) => each.rank) };
  }

  draw() {
    const table = this.table(), empty = byId("heat-empty");
    const total = table ? table.rows.flat().reduce((a, b) => a + b, 0) : 0;
    byId("heat-body").hidden = !total;
    empty.hidden = Boolean(total);
    if (!total) {
      const told = this.samples.at(-1)?.ranks.length;
      empty.textContent = !this.samples.length ? "Asking the ranks." : table ? "No rows in this span." : told
        ? "No rows counted yet. They begin with the first request."
        : "No rank has answered.";
      this.current = null;
      return;
    }
    this.current = table;
    const means = table.rows.map((row) => row.reduce((a, b) => a + b, 0) / row.length);
    this.relative = table.rows.map((row, l) => row.map((count) => (means[l] ? count / means[l] : 0)));
    this.top = Math.max(2, Math.ceil(Math.max(...this.relative.flat())));
    this.paint();
    this.summary(table);
    if (this.cell) this.tell();
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
    const head = make("tr", {}, ...["Rank", "Rows", "Share", "Busiest expert"].map((text) => make("th", { scope: "col", text })));
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
    byId("heat-ranks").tBodies[0]?.remove();
    byId("heat-ranks").append(make("tbody", {}, head, ...lines));
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

/** A colour for 0 to 1, through three of the page's own. */
function shades() {
  const stops = ["--heat-0", "--heat-1", "--heat-2"].map((name) => color(name).match(/[0-9a-f]{2}/gi).map((pair) => parseInt(pair, 16)));
  return (value) => {
    const at = Math.min(1, Math.max(0, value)) * 2, i = Math.min(1, Math.floor(at));
    return `rgb(${stops[i].map((from, c) => Math.round(from + (stops[i + 1][c] - from) * (at - i))).join(" ")})`;
  };
}
