// Whether the server can serve: asks until it can, and now and then after that.
import { health } from "./api.js";
import { byId, el, icon } from "./dom.js";
import { t } from "./i18n.js";

const ASK_MS = { ready: 10_000, offline: 2000 };
const ASK_SOON_MS = 700;

export class ServerState {
  /** `onChange()` is called when the phase or the model changed. */
  constructor(onChange) {
    this.onChange = onChange;
    this.phase = ""; // not known yet
    this.message = "";
    this.model = "";
    this.timer = null;
  }

  get isReady() {
    return this.phase === "ready";
  }

  /** Asks now, and goes on asking. */
  async ask() {
    clearTimeout(this.timer);
    const { phase, message, model } = await health();
    Object.assign(this, { phase, message, model: model || this.model });
    this.onChange();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), ASK_MS[phase] ?? ASK_SOON_MS);
  }

  draw() {
    if (this.phase === "") return;
    byId("model-name").textContent = this.model;
    byId("model-phase").textContent = t(`state.${this.phase}`);
    byId("model-state").dataset.phase = this.phase;
    byId("notice").hidden = this.phase === "ready";
    if (this.phase !== "ready") byId("notice-text").textContent = t(`notice.${this.phase}`, { message: this.message });
  }
}

let toastTimer = null;

/** Shows a short message at the bottom, with a button if it has one. */
export function showToast(text, label = null, onclick = null) {
  const node = byId("toast");
  const close = () => (node.hidden = true);
  const act = () => {
    close();
    onclick();
  };
  const button = label && el("button", { type: "button", class: "button is-small", onclick: act }, label);
  const dismiss = el("button", { type: "button", class: "icon-button", "aria-label": t("app.close"), onclick: close }, icon("close"));
  node.replaceChildren(el("span", {}, text), button, dismiss);
  node.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(close, 8000);
}
