// The box in which a message is written, and its keys.
import { byId, fitHeight } from "./dom.js";
import { t } from "./i18n.js";

const touch = matchMedia("(pointer: coarse)"); // Enter breaks the line on a screen keyboard

export class Composer {
  /** `actions` has send(text) and stop(). */
  constructor(actions) {
    this.actions = actions;
    this.isReady = false;
    this.isRunning = false;
    this.drafts = new Map(); // conversation id -> text that was not sent
    this.id = null;
    this.input = byId("message-input");
    this.sendButton = byId("send");
    this.stopButton = byId("stop");
    this.hint = byId("composer-hint");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("input", () => this.draw());
    this.input.addEventListener("keydown", (event) => this.onKey(event));
    this.stopButton.addEventListener("click", () => actions.stop());
    addEventListener("resize", () => fitHeight(this.input));
    touch.addEventListener("change", () => this.draw());
  }

  onKey(event) {
    const isPlain = !event.shiftKey && !event.altKey && !event.isComposing && event.keyCode !== 229; // 229: an input method
    if (event.key !== "Enter" || !isPlain || (touch.matches && !event.ctrlKey && !event.metaKey)) return;
    event.preventDefault();
    this.send();
  }

  send() {
    const text = this.input.value;
    if (!text.trim() || !this.isReady || this.isRunning) return;
    this.input.value = "";
    this.draw();
    this.actions.send(text);
  }

  /** Shows what is being written in another conversation. */
  open(id) {
    if (this.id !== id) {
      this.drafts.set(this.id, this.input.value);
      this.input.value = this.drafts.get(id) ?? "";
      this.id = id;
    }
    this.draw();
  }

  /** Says whether the server takes messages, and whether this conversation's answer is being made. */
  setState(isReady, isRunning) {
    this.isReady = isReady;
    this.isRunning = isRunning;
    this.draw();
  }

  draw() {
    const hadFocus = [this.sendButton, this.stopButton].includes(document.activeElement);
    this.sendButton.hidden = this.isRunning;
    this.stopButton.hidden = !this.isRunning;
    this.sendButton.disabled = !this.isReady || !this.input.value.trim();
    this.hint.textContent = t(touch.matches ? "chat.hint_touch" : "chat.hint");
    if (hadFocus) this.input.focus();
    fitHeight(this.input);
  }

  focus() {
    if (!touch.matches) this.input.focus();
  }
}
