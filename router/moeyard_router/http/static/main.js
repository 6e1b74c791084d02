// The page's heart: asks /v1/fleet/live once a second while somebody looks, and shows what it says.
import { byId, call } from "./format.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Experts } from "./experts.js";
import { History } from "./history.js";
import { showRanks, showRequests, showTiles } from "./ranks.js";

const EVERY = 1000;
const history = new History(), charts = new Charts(), experts = new Experts(), chat = new Chat();

function show(live) {
  history.add(live);
  byId("model").textContent = live.model;
  byId("updated").textContent = `Updated ${new Date(live.time * 1000).toLocaleTimeString("en-GB")}`;
  const kind = live.failure ? "failed" : live.unready ? "warming" : "ready";
  state(kind, live.failure ? "failed" : live.stopping ? "stopping" : live.recovering ? "recovering" : live.unready ? "not ready" : "ready", live.unready);
  showTiles(history);
  showRanks(history);
  showRequests(live.requests);
  charts.show(history);
  chat.know(live);
}

/** The pill, the window's title, and a banner where there is a reason. */
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
    byId("key-panel").hidden = false;
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
    } catch (error) {
      lost(error);
      if (!(error.status || error.name === "TimeoutError" || error.name === "AbortError" || error instanceof TypeError)) console.error(error);
    }
  }
  setTimeout(poll, EVERY);
}

byId("key-open").addEventListener("click", () => {
  byId("key-panel").hidden = !byId("key-panel").hidden;
  if (!byId("key-panel").hidden) byId("key").focus();
});
byId("key-save").addEventListener("click", () => {
  sessionStorage.setItem("moeyard-key", byId("key").value.trim());
  byId("key").value = "";
  byId("key-panel").hidden = true;
});
byId("key-forget").addEventListener("click", () => {
  sessionStorage.removeItem("moeyard-key");
  byId("key-panel").hidden = true;
});
byId("key").addEventListener("keydown", (event) => { if (event.key === "Enter") byId("key-save").click(); });

poll();
