// Ask /v1/fleet/live once a second while the page is visible, and show the answer.
import { byId, call } from "./format.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Experts } from "./experts.js";
import { History } from "./history.js";
import { Incidents } from "./incidents.js";
import { showRanks, showTiles } from "./ranks.js";
import { showRefusals } from "./refusals.js";
import { showRequests } from "./requests.js";
import { Settings } from "./settings.js";

const EVERY = 1000;
const history = new History(), charts = new Charts(), experts = new Experts(), chat = new Chat();
const incidents = new Incidents(), settings = new Settings();

function show(live) {
  history.add(live);
  byId("model").textContent = live.model;
  byId("updated").textContent = `Updated ${new Date(live.time * 1000).toLocaleTimeString("en-GB")}`;
  const kind = live.failure ? "failed" : live.unready ? "warming" : "ready";
  state(kind, live.failure ? "failed" : live.stopping ? "stopping" : live.recovering ? "recovering" : live.unready ? "not ready" : "ready", live.unready);
  showTiles(history);
  showRanks(history);
  showRequests(live.requests);
  showRefusals(history, live.refusals);
  charts.show(history);
  chat.know(live);
}

/** Show the state in the pill and the window's title, and in a banner if there is a reason. */
function state(kind, word, reason) {
  const pill = byId("state"), banner = byId("banner");
  pill.className = `pill ${kind}`;
  if (pill.textContent !== word) pill.textContent = word;
  document.title = kind === "ready" ? `moeyard, ${history.latest?.model ?? ""}` : `${word}: moeyard`;
  banner.hidden = !reason;
  banner.className = `banner ${kind}`;
  const title = { failed: "Not serving.", warming: "Not ready." }[kind] ?? "";
  if (byId("banner-text").textContent !== (reason ?? "")) {
    byId("banner-title").textContent = title;
    byId("banner-text").textContent = reason ?? "";
  }
}

function lost(error) {
  const wanted = error.status === 401 || error.status === 403;
  document.body.classList.toggle("stale", Boolean(history.latest) && !wanted);
  if (wanted) {
    showKey(true);
    state("warming", "key wanted", `The server wants an API key: ${error.message}`);
  } else {
    state("failed", "no answer", `The router does not answer: ${error.message}`);
  }
}

async function poll() {
  if (!document.hidden) {
    try {
      const live = await (await call("v1/fleet/live", { signal: AbortSignal.timeout(5000) })).json();
      document.body.classList.remove("stale");
      show(live);
      await experts.poll();
      await incidents.poll(live);
      await settings.poll(live);
    } catch (error) {
      lost(error);
      if (error.status === undefined) reportError(error);
    }
  }
  setTimeout(poll, EVERY);
}

function showKey(shown) {
  byId("key-panel").hidden = !shown;
  byId("key-open").setAttribute("aria-expanded", String(shown));
}

byId("key-open").addEventListener("click", () => {
  showKey(byId("key-panel").hidden);
  if (!byId("key-panel").hidden) byId("key").focus();
});
byId("key-save").addEventListener("click", () => {
  sessionStorage.setItem("moeyard-key", byId("key").value.trim());
  byId("key").value = "";
  showKey(false);
  byId("key-open").focus();
});
byId("key-forget").addEventListener("click", () => {
  sessionStorage.removeItem("moeyard-key");
  showKey(false);
  byId("key-open").focus();
});
byId("key").addEventListener("keydown", (event) => { if (event.key === "Enter") byId("key-save").click(); });

poll();
