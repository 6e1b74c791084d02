// A conversation over the server's own API: chat where the model has a template, else plain completion, else token ids.
import { byId, call, make, secondsText } from "./format.js";

export class Chat {
  constructor() {
    this.messages = [];
    this.running = null;
    this.live = null;
    byId("send").addEventListener("click", () => this.send());
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
  }

  /** What the model takes. */
  know(live) {
    if (this.live) return;
    this.live = live;
    const what = live.has_chat ? "Message" : live.has_text ? "Text to go on with" : "Token ids, e.g. 1 2 3";
    byId("prompt").placeholder = what;
    byId("prompt-label").textContent = what;
    if (!live.has_text) byId("chat-empty").textContent = "This server has no tokenizer: prompts and answers are token ids.";
    byId("max-tokens").max = live.max_model_len;
    byId("max-tokens").value = Math.min(128, Math.ceil(live.max_model_len / 2));
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    byId("talk").replaceChildren(byId("chat-empty"));
    byId("chat-empty").hidden = false;
  }

  say(kind, text) {
    byId("chat-empty").hidden = true;
    const box = make("div", { class: `say ${kind}`, text });
    byId("talk").append(box);
    box.scrollIntoView({ block: "nearest" });
    return box;
  }

  body(text) {
    const common = { model: this.live.model, max_tokens: Number(byId("max-tokens").value) || 128, stream: true, stream_options: { include_usage: true } };
    const temperature = byId("temperature").value;
    if (temperature !== "") common.temperature = Number(temperature);
    if (this.live.has_chat) return ["v1/chat/completions", { ...common, messages: this.messages }];
    const prompt = this.live.has_text ? text : text.split(/[\s,]+/).filter(Boolean).map(Number);
    return ["v1/completions", { ...common, prompt }];
  }

  async send() {
    const field = byId("prompt"), text = field.value.trim();
    if (!text || this.running || !this.live) return;
    field.value = "";
    this.say("user", text);
    this.messages.push({ role: "user", content: text });
    const [path, body] = this.body(text), box = this.say("assistant", "…");
    this.running = new AbortController();
    byId("stop").hidden = false;
    byId("send").disabled = true;
    const told = { text: "", tokens: null, begun: performance.now(), first: null, last: null };
    try {
      const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: this.running.signal };
      await read(await call(path, options), (event) => this.take(event, told, box));
    } catch (error) {
      if (error.name !== "AbortError") this.say("error", error.message);
    }
    this.running = null;
    byId("stop").hidden = true;
    byId("send").disabled = false;
    if (told.text) this.messages.push({ role: "assistant", content: told.text });
    else this.messages.pop();
    this.sum(told, box);
  }

  take(event, told, box) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) told.tokens = event.usage.completion_tokens;
    const choice = event.choices[0];
    const piece = choice?.delta?.content ?? choice?.text ?? "", ids = this.live.has_text ? "" : (choice?.token_ids ?? []).join(" ");
    if (!piece && !ids) return;
    told.last = performance.now();
    told.first ??= told.last;
    told.text += piece || (told.text ? ` ${ids}` : ids);
    box.textContent = told.text;
    const talk = byId("talk");
    if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80) talk.scrollTop = talk.scrollHeight;
  }

  /** What this browser saw of the answer. */
  sum(told, box) {
    if (!told.text) {
      box.remove();
      return;
    }
    const parts = [`first token after ${secondsText((told.first - told.begun) / 1000)}`];
    if (told.tokens > 1) parts.unshift(`${told.tokens} tokens`), parts.push(`${secondsText((told.last - told.first) / 1000 / (told.tokens - 1))} per token`);
    box.append(make("small", { text: parts.join(", ") }));
    byId("talk").scrollTop = byId("talk").scrollHeight;
  }
}

/** Server-sent events of an answer, one JSON object each. */
async function read(answer, take) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ") && event !== "data: [DONE]") take(JSON.parse(event.slice(6)));
  }
}
