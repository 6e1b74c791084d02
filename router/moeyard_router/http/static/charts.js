// Three charts of the last five minutes, drawn by uPlot (a global of uplot.js).
import { amount, byId, clock, color, make, rankColor, secondsText } from "./format.js";
import { KEPT_SECONDS } from "./history.js";

const HEIGHT = 148, LATENCY_SPAN = 15, TABLE_SECONDS = 30;

class Chart {
  /** `lines`: [name, CSS variable of its colour]; `text` formats a value. */
  constructor(id, lines, text) {
    this.figure = byId(id);
    this.lines = lines;
    this.text = text;
    this.keys = make("div", { class: "keys" });
    this.box = make("div", { role: "img" });
    this.figure.querySelector(".keys")?.remove();
    this.figure.querySelector("[role=img]")?.remove();
    this.figure.append(this.keys, this.box);
    for (const [name, variable] of lines) {
      const dot = make("i");
      dot.style.setProperty("--own", `var(${variable})`);
      this.keys.append(make("span", {}, dot, name, make("b")));
    }
    this.plot = new uPlot(this.options(), [[], ...lines.map(() => [])], this.box);
    this.observer = new ResizeObserver(() => this.plot.setSize({ width: this.width(), height: HEIGHT }));
    this.observer.observe(this.figure);
  }

  width() {
    return Math.max(120, this.figure.clientWidth - 24);
  }

  options() {
    const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    return {
      width: this.width(),
      height: HEIGHT,
      padding: [6, 8, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true, range: (_, low, high) => [(high ?? 0) - KEPT_SECONDS, high ?? 0] }, y: { range: (_, low, high) => [0, (high || 1) * 1.12] } },
      axes: [
        { ...axis, size: 24, space: 52, values: (_, ticks) => ticks.map((t) => new Date(t * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })) },
        { ...axis, size: 52, space: 34, values: (_, ticks) => ticks.map((v) => this.text(v)) },
      ],
      series: [{}, ...this.lines.map(([name, variable], i) => ({ label: name, stroke: color(variable), width: 1.6, points: { show: false }, dash: name === "p95" ? [4, 3] : undefined }))],
      hooks: { setCursor: [(plot) => this.say(plot.cursor.idx)] },
    };
  }

  set(data) {
    this.data = data;
    this.plot.setData(data);
    this.say(this.plot.cursor.idx);
    this.box.setAttribute("aria-label", `${this.figure.querySelector("figcaption").textContent}: ${this.keys.textContent}`);
  }

  /** The values under the pointer, or the latest. */
  say(index) {
    if (!this.data) return;
    const at = index ?? this.data[0].length - 1;
    [...this.keys.children].forEach((key, i) => { key.lastChild.textContent = this.text(this.data[i + 1][at]); });
  }

  end() {
    this.observer.disconnect();
    this.plot.destroy();
  }
}

export class Charts {
  constructor() {
    this.charts = null;
    this.table = byId("charts-table");
    this.table.addEventListener("toggle", () => this.tell());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  rebuild() {
    this.charts?.forEach((chart) => chart.end());
    this.charts = null;
    if (this.history) this.show(this.history);
  }

  show(history) {
    this.history = history;
    const { samples } = history, workers = history.latest.workers;
    if (this.charts && this.count !== workers.length) this.rebuild();
    if (!this.charts) {
      this.count = workers.length;
      const both = [["p50", "--c0"], ["p95", "--c2"]];
      this.charts = [
        new Chart("chart-output", workers.map((w) => [`rank ${w.rank}`, rankColor(w.rank)]), amount),
        new Chart("chart-ttft", both, secondsText),
        new Chart("chart-tpot", both, secondsText),
      ];
    }
    const times = samples.map((s) => s.time), every = (made) => samples.map((_, at) => (at ? made(at) : null));
    const [output, ttft, tpot] = this.charts;
    output.set([times, ...workers.map((_, i) => every((at) => history.rate((s) => s.workers[i]?.snapshot?.generation_tokens, 3, at)))]);
    for (const [chart, name] of [[ttft, "time_to_first_token_seconds"], [tpot, "time_per_output_token_seconds"]]) {
      const found = every((at) => history.quantiles(name, [0.5, 0.95], LATENCY_SPAN, at));
      chart.set([times, found.map((f) => f?.[0] ?? null), found.map((f) => f?.[1] ?? null)]);
    }
    this.tell();
  }

  /** Fill the table while it is open: a row per half minute, the latest first. */
  tell() {
    if (!this.table.open || !this.charts) return;
    const [output, ttft, tpot] = this.charts, times = output.data[0];
    const columns = [...output.lines.map(([name], i) => [`${name}, tokens/s`, output, i]), ...[[ttft, "TTFT"], [tpot, "TPOT"]].flatMap(([chart, name]) => chart.lines.map(([line], i) => [`${name} ${line}`, chart, i]))];
    const rows = [];
    for (let at = times.length - 1; at >= 0; at--) if (!rows.length || times[rows.at(-1)] - times[at] >= TABLE_SECONDS) rows.push(at);
    this.table.querySelector("thead tr").replaceChildren(...["Time", ...columns.map(([name]) => name)].map((text) => make("th", { scope: "col", text })));
    this.table.querySelector("tbody").replaceChildren(...rows.map((at) => make("tr", {}, make("td", { text: clock(times[at]) }),
      ...columns.map(([, chart, i]) => make("td", { text: chart.text(chart.data[i + 1][at]) })))));
  }
}
