// Answers of /v1/fleet/live over time, and what is made of two of them: rates, and quantiles as Prometheus makes them.

export const KEPT_SECONDS = 300;

export class History {
  constructor() {
    this.samples = [];
  }

  /** Take an answer. Totals that have fallen are those of other workers or of another router: history starts again. */
  add(live) {
    const last = this.samples.at(-1);
    if (last && (live.monotonic < last.monotonic || live.generation !== last.generation)) this.samples = [];
    const { requests, refusals, ...kept } = live;
    this.samples.push(kept);
    while (this.samples.length > 2 && this.samples[0].monotonic < live.monotonic - KEPT_SECONDS - 1) this.samples.shift();
  }

  get latest() {
    return this.samples.at(-1);
  }

  /** The youngest sample that is `span` seconds older than sample `at`, or the oldest there is; null for the first one. */
  before(at, span) {
    const until = this.samples[at].monotonic - span + 0.25;
    for (let i = at - 1; i >= 0; i--) if (this.samples[i].monotonic <= until || i === 0) return this.samples[i];
    return null;
  }

  /** Growth per second of the total that `pick` takes out of a sample, up to sample `at`; null if it is not known. */
  rate(pick, span, at = this.samples.length - 1) {
    const old = this.before(at, span), now = this.samples[at];
    if (!old) return null;
    const from = pick(old), to = pick(now);
    return from == null || to == null ? null : Math.max(0, to - from) / (now.monotonic - old.monotonic);
  }

  /** How much the total that `pick` takes out of a sample has grown; one that nobody knew `span` seconds ago was 0. */
  growth(pick, span) {
    const at = this.samples.length - 1, old = this.before(at, span), to = pick(this.samples[at]);
    return !old || to == null ? null : Math.max(0, to - (pick(old) ?? 0));
  }

  /** Quantiles `qs` of what a histogram observed in the `span` seconds up to sample `at`; null if it observed nothing. */
  quantiles(name, qs, span, at = this.samples.length - 1) {
    const old = this.before(at, span), now = this.samples[at].histograms[name];
    if (!old || !now) return null;
    const past = old.histograms[name]?.buckets;
    const buckets = now.buckets.map(([bound, count], i) => [bound, count - (past ? past[i][1] : 0)]);
    const total = buckets.at(-1)[1];
    return total > 0 ? qs.map((q) => quantile(buckets, q * total)) : null;
  }
}

/** Where `rank` observations are below, linear within a bucket; in the last one its lower bound, as in Prometheus. */
export function quantile(buckets, rank) {
  let lower = 0, below = 0;
  for (const [bound, count] of buckets) {
    if (count >= rank) return bound === null ? lower : lower + (bound - lower) * ((rank - below) / (count - below));
    lower = bound;
    below = count;
  }
  return lower;
}
