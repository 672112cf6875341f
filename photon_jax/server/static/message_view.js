// One message on the page.
import { el, fitHeight, icon, iconButton } from "./dom.js";
import { t } from "./i18n.js";
import { statsText } from "./live.js";
import { renderMarkdown } from "./markdown.js";

const MIN_RENDER_MS = 80;
const RENDER_SHARE = 6; // a render that takes 10 ms is followed by 60 ms without one

/** Copies text, and lets the button say so for a moment. */
export async function copyText(text, button) {
  await navigator.clipboard.writeText(text);
  button.classList.add("is-done");
  button.title = t("message.copied");
  setTimeout(() => button.classList.remove("is-done"), 1200);
}

/** Copies the code block whose button was clicked, if one was. */
export function copyCode(target) {
  const button = target.closest(".copy-code");
  if (button) copyText(button.closest(".code").querySelector("pre").textContent, button);
}

/** Returns an error in words, the server's own among them, with a button that tries again. */
export function errorBox({ kind, message }, retry) {
  return el(
    "div",
    { class: "error", role: "alert" },
    el("strong", {}, t(`error.${kind}`)),
    message ? el("p", {}, message) : null,
    el("button", { type: "button", class: "button is-small", onclick: retry }, icon("again"), t("message.retry")),
  );
}

/** Returns an editor in the place of a message. */
function makeEditor(text, saveLabel, onSave, onCancel) {
  const area = el("textarea", { class: "editor", value: text, "aria-label": t("message.editor") });
  const save = el("button", { type: "submit", class: "button is-main" }, saveLabel);
  const cancel = el("button", { type: "button", class: "button", onclick: onCancel }, t("message.cancel"));
  const form = el("form", { class: "edit-form" }, area, el("div", { class: "row" }, save, cancel));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onSave(area.value);
  });
  area.addEventListener("input", () => fitHeight(area));
  area.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") onCancel();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    if (event.key === "Escape") event.stopPropagation();
  });
  requestAnimationFrame(() => {
    fitHeight(area);
    area.focus();
  });
  return form;
}

export class UserMessageView {
  /** `actions` has edit(message, text). */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = el("article", { class: "message is-user", "aria-label": t("chat.you") });
    this.update();
  }

  update() {
    const { message } = this;
    const copy = iconButton("copy", t("message.copy"), () => copyText(message.content, copy));
    const edit = iconButton("edit", t("message.edit"), () => this.edit());
    const actions = el("div", { class: "message-actions" }, edit, copy);
    this.node.replaceChildren(el("div", { class: "bubble" }, message.content), actions);
  }

  edit() {
    const save = (text) => text.trim() && this.actions.edit(this.message, text);
    this.node.replaceChildren(makeEditor(this.message.content, t("message.resend"), save, () => this.update()));
  }
}

export class AnswerView {
  /**
   * `actions` has again(message), continue(message), saveText(message, text); `tokenBox` shows tokens, and
   * `showsTokens` says whether it does from the start, where the answer has any.
   */
  constructor(message, actions, tokenBox, showsTokens) {
    this.message = message;
    this.actions = actions;
    this.tokenBox = tokenBox;
    this.showsTokens = showsTokens;
    this.timer = null;
    this.renderMs = 0;
    this.thought = el("div", { class: "thoughts" });
    this.thoughtTitle = el("summary", {});
    this.thinking = el("details", { class: "thinking", hidden: true }, this.thoughtTitle, this.thought);
    this.prose = el("div", { class: "prose" });
    this.foot = el("div", { class: "message-foot" });
    this.node = el("article", { class: "message is-answer", "aria-label": t("chat.model") });
    this.node.append(this.thinking, this.prose, this.foot);
    this.update();
  }

  /** Draws what changed: soon while the answer streams, at once when it does not. */
  update() {
    const isRunning = this.message.state === "running";
    this.node.classList.toggle("is-running", isRunning);
    this.node.setAttribute("aria-busy", String(isRunning));
    if (isRunning && this.timer !== null) return;
    const wait = Math.max(MIN_RENDER_MS, this.renderMs * RENDER_SHARE);
    clearTimeout(this.timer);
    this.timer = isRunning ? setTimeout(() => this.drawLater(), wait) : null;
    this.draw();
  }

  drawLater() {
    this.timer = null;
    if (this.node.isConnected) this.draw();
  }

  draw() {
    const startedAt = performance.now();
    const { message } = this;
    const isThinking = message.state === "running" && !message.content;
    this.thinking.hidden = !message.reasoning;
    this.thoughtTitle.textContent = t(isThinking ? "message.thinking" : "message.thought");
    if (message.reasoning) this.thought.textContent = message.reasoning.trim();
    const hasTokens = this.showsTokens && message.tokens.length > 0;
    this.prose.classList.toggle("is-tokens", hasTokens);
    if (hasTokens) this.tokenBox.drawTokens(this.prose, message.tokens);
    else renderMarkdown(this.prose, message.content);
    this.foot.replaceChildren(...(message.state === "running" ? [] : this.footParts()));
    this.renderMs = performance.now() - startedAt;
    this.onDraw?.();
  }

  footParts() {
    const { message } = this;
    const note = message.state === "stopped" ? "message.stopped" : message.finish === "length" ? "message.length" : null;
    const texts = [note && t(note), statsText(message.stats)].filter(Boolean);
    const parts = message.error ? [errorBox(message.error, () => this.actions.again(message))] : [];
    return [...parts, el("div", { class: "foot-row" }, this.buttons(), el("span", { class: "stats" }, texts.join(" ")))];
  }

  buttons() {
    const { message, actions } = this;
    const copy = iconButton("copy", t("message.copy"), () => copyText(message.content, copy));
    const again = iconButton("again", t("message.again"), () => actions.again(message));
    const edit = iconButton("edit", t("message.edit"), () => this.edit());
    const buttons = el("div", { class: "message-actions" }, copy, again, edit);
    if (message.tokens.length > 0) {
      const label = t(this.showsTokens ? "message.text" : "message.tokens");
      buttons.append(iconButton("tokens", label, () => this.toggleTokens()));
    }
    const isUnfinished = message.state !== "done" || message.finish === "length";
    if (isUnfinished && (message.content || message.reasoning)) {
      const label = t("message.continue");
      const onclick = () => actions.continue(message);
      buttons.append(el("button", { type: "button", class: "button is-small", onclick }, icon("continue"), label));
    }
    return buttons;
  }

  toggleTokens() {
    this.showsTokens = !this.showsTokens;
    this.tokenBox.clearTokens(this.prose);
    this.draw();
  }

  edit() {
    const save = (text) => this.actions.saveText(this.message, text);
    const cancel = () => {
      this.prose.replaceChildren();
      this.draw();
    };
    this.tokenBox.clearTokens(this.prose);
    this.prose.classList.remove("is-tokens");
    this.prose.replaceChildren(makeEditor(this.message.content, t("message.save"), save, cancel));
    this.foot.replaceChildren();
  }
}
