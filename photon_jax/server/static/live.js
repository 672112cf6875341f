// The line that says how an answer is getting on, and the line of numbers that stays with it.
import { el } from "./dom.js";
import { number, rate, t } from "./i18n.js";

export function tokensText(n) {
  return t(n === 1 ? "live.token" : "live.tokens", { n: number(n) });
}

function promptText(stats) {
  const parts = [t("live.prompt", { n: number(stats.prompt) })];
  if (stats.cached) parts.push(t("live.cached", { n: number(stats.cached) }));
  if (stats.promptRate) parts.push(t("live.rate", { rate: rate(stats.promptRate) }));
  return parts.join(", ");
}

/** Returns the numbers of a finished answer as one line of text, without those of its prompt if it is to be short. */
export function statsText(stats, isShort = false) {
  if (!stats || stats.tokens === 0) return "";
  const parts = [tokensText(stats.tokens)];
  if (stats.rate) parts.push(t("live.rate", { rate: rate(stats.rate) }));
  if (stats.first !== null) parts.push(t("live.first", { s: number(stats.first, 2) }));
  if (isShort) return parts.join(" · ");
  if (stats.prompt) parts.push(promptText(stats));
  return parts.join(" · ");
}

function promptParts(meter) {
  const of = t("live.of", { done: number(meter.promptDone), all: number(meter.promptTokens) });
  const cached = meter.cachedTokens ? t("live.cached", { n: number(meter.cachedTokens) }) : null;
  return [t("live.reading"), of, cached].filter((part) => part !== null);
}

function outputParts(meter) {
  const parts = [tokensText(meter.tokens)];
  if (meter.liveRate !== null) parts.push(t("live.rate", { rate: rate(meter.liveRate) }));
  parts.push(t("live.first", { s: number(meter.firstAt - meter.startedAt, 2) }));
  return parts;
}

export class LiveLine {
  constructor(node) {
    this.text = el("span", { class: "live-text" });
    this.bar = el("progress", { class: "live-bar", hidden: true, "aria-label": t("live.reading") });
    node.append(this.bar, this.text);
  }

  /** Shows a meter as it stands; null shows nothing. */
  draw(meter) {
    const isReading = meter !== null && meter.tokens === 0 && meter.promptTokens > 0;
    this.bar.hidden = !isReading;
    if (meter === null) {
      this.text.textContent = "";
      return;
    }
    if (isReading) {
      this.bar.max = meter.promptTokens;
      this.bar.value = meter.promptDone;
    }
    const waiting = () => [t("live.waiting", { s: number(meter.seconds, 1) })];
    const parts = meter.tokens > 0 ? outputParts(meter) : isReading ? promptParts(meter) : waiting();
    this.text.textContent = parts.join(" · ");
  }
}
