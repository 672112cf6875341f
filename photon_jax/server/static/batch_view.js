// "Ask k at once": k answers side by side, and what the engine does meanwhile.
import { newAnswer, runAnswers } from "./answer.js";
import { newConversation, requestBody } from "./conversation.js";
import { byId, el, iconButton, oncePerFrame } from "./dom.js";
import { number, onLanguage, rate, t } from "./i18n.js";
import { statsText, tokensText } from "./live.js";
import { renderMarkdown } from "./markdown.js";
import { errorBox } from "./message_view.js";

const MAX_COUNT = 64;

/** One of the answers that run side by side. */
class Card {
  constructor(index, keep) {
    this.message = newAnswer();
    this.meter = null;
    this.drawn = "";
    this.state = el("span", { class: "card-state" });
    this.text = el("div", { class: "card-text prose", tabIndex: 0, role: "group", "aria-label": t("batch.answer", { n: index + 1 }) });
    this.stats = el("span", { class: "card-stats" });
    this.keep = iconButton("chat", t("batch.keep"), () => keep(this));
    const name = el("span", { class: "card-name" }, `${index + 1}`);
    const head = el("header", {}, name, this.state);
    this.node = el("article", { class: "card" }, head, this.text, el("footer", {}, this.stats, this.keep));
    this.draw = oncePerFrame(() => this.drawNow());
    this.draw();
  }

  get tokens() {
    return this.meter?.tokens ?? 0;
  }

  /** Takes its meter, and draws when something came. */
  take(meter) {
    this.meter = meter;
    const now = `${meter.tokens} ${this.message.finish} ${this.message.state}`;
    if (now !== this.drawn) this.draw();
    this.drawn = now;
  }

  drawNow() {
    const { message, meter } = this;
    const isRunning = message.state === "running" && message.finish === null;
    this.node.classList.toggle("is-running", isRunning && this.tokens > 0);
    const text = [message.reasoning, message.content].filter(Boolean).join("\n\n");
    const isAtEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 24;
    this.text.classList.toggle("is-plain", isRunning);
    if (!isRunning) renderMarkdown(this.text, text);
    else if (this.text.textContent !== text) this.text.textContent = text;
    if (isAtEnd && isRunning) this.text.scrollTop = this.text.scrollHeight;
    if (message.error) this.text.textContent = [t(`error.${message.error.kind}`), message.error.message].join(" ");
    this.node.classList.toggle("is-failed", message.state === "failed");
    const live = meter?.liveRate ? t("live.rate", { rate: rate(meter.liveRate) }) : this.tokens ? "" : t("batch.queued");
    this.state.textContent = isRunning ? live : "";
    this.stats.textContent = isRunning ? tokensText(this.tokens) : statsText(meter.summary(), true);
    this.keep.hidden = message.state === "running" || !text;
  }
}

export class BatchView {
  /** `actions` has model(), settings(), isReady(), keep(conversation); `monitor` draws the engine. */
  constructor(actions, monitor) {
    this.actions = actions;
    this.monitor = monitor;
    this.cards = [];
    this.controller = null;
    this.startedAt = 0;
    this.prompt = byId("batch-prompt");
    this.count = byId("batch-count");
    this.startButton = byId("batch-start");
    this.stopButton = byId("batch-stop");
    this.summary = byId("batch-summary");
    byId("batch-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.start();
    });
    this.stopButton.addEventListener("click", () => this.stop());
    this.count.addEventListener("input", () => this.draw());
    this.drawSummary = oncePerFrame(() => this.drawSummaryNow());
    onLanguage(() => {
      this.draw();
      for (const card of this.cards) card.draw();
    });
    this.draw();
  }

  get isRunning() {
    return this.controller !== null;
  }

  get wanted() {
    const count = Math.round(Number(this.count.value));
    return Math.max(1, Math.min(MAX_COUNT, Number.isFinite(count) ? count : 1));
  }

  draw() {
    this.startButton.textContent = t("batch.start", { k: this.wanted });
    this.startButton.disabled = !this.actions.isReady() || this.isRunning;
    this.stopButton.hidden = !this.isRunning;
  }

  async start() {
    if (this.isRunning || !this.actions.isReady()) return;
    this.text = this.prompt.value.trim() || t("batch.example");
    this.prompt.value = this.text;
    this.controller = new AbortController();
    this.startedAt = performance.now();
    this.endedAt = null;
    this.cards = Array.from({ length: this.wanted }, (_, index) => new Card(index, (card) => this.keep(card)));
    byId("batch-cards").replaceChildren(...this.cards.map((card) => card.node));
    this.draw();
    const messages = this.cards.map((card) => card.message);
    await runAnswers(messages, this.body(), this.controller.signal, (meters) => {
      this.cards.forEach((card, index) => card.take(meters[index]));
      this.drawSummary();
    });
    this.controller = null;
    this.endedAt = performance.now();
    this.draw();
    this.drawSummaryNow();
    const { error } = messages[0];
    if (error && this.cards.every((card) => card.tokens === 0)) this.showError(error);
  }

  /** Shows an error that all answers have in common, once. */
  showError(error) {
    byId("batch-cards").replaceChildren(errorBox(error, () => this.start()));
  }

  /** Returns one request for all answers: a browser opens few connections to a server, and waits with the others. */
  body() {
    const settings = { ...this.actions.settings(), showsTokens: false };
    const body = requestBody(this.actions.model(), settings, [{ role: "user", content: this.text }]);
    return { ...body, n: this.cards.length, return_token_ids: true };
  }

  stop() {
    this.controller?.abort();
  }

  drawSummaryNow() {
    const tokens = this.cards.reduce((sum, card) => sum + card.tokens, 0);
    const seconds = ((this.endedAt ?? performance.now()) - this.startedAt) / 1000;
    const values = { n: number(this.cards.length), tokens: number(tokens), s: number(seconds, 1) };
    this.summary.textContent = tokens > 0 ? t("batch.summary", { ...values, rate: rate(tokens / seconds) }) : "";
  }

  /** Makes a conversation of one card. */
  keep(card) {
    const conversation = newConversation(this.actions.settings());
    conversation.messages = [{ role: "user", content: this.text }, card.message];
    this.actions.keep(conversation);
  }

  show() {
    this.monitor.start();
    this.draw();
  }

  hide() {
    this.monitor.stop();
  }
}
