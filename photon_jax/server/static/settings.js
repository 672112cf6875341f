// The panel of parameters: those of the conversation that is open, which new ones begin with too.
import { apiKey, setApiKey } from "./api.js";
import { PARAMETERS, newSettings } from "./conversation.js";
import { byId, el, fitHeight } from "./dom.js";
import { number, onLanguage, t, translate } from "./i18n.js";

export class Settings {
  /** `onChange(settings)` is called after each change; `onKey()` after one of the API key. */
  constructor(onChange, onKey) {
    this.onChange = onChange;
    this.settings = newSettings();
    this.panel = byId("settings");
    this.inputs = new Map();
    this.makeFields();
    byId("open-settings").addEventListener("click", () => this.toggle(this.panel.hidden));
    byId("close-settings").addEventListener("click", () => this.toggle(false));
    byId("reset-settings").addEventListener("click", () => {
      Object.assign(this.settings, newSettings());
      this.changed();
    });
    this.listen("system-prompt", "input", (node) => (this.settings.system = node.value));
    this.listen("thinking", "change", (node) => (this.settings.thinking = node.value));
    this.listen("show-tokens", "change", (node) => (this.settings.showsTokens = node.checked));
    byId("api-key").value = apiKey();
    byId("api-key").addEventListener("change", ({ target }) => {
      setApiKey(target.value.trim());
      onKey();
    });
    onLanguage(() => this.draw());
  }

  listen(id, kind, read) {
    byId(id).addEventListener(kind, ({ target }) => {
      read(target);
      this.onChange(this.settings);
      if (id === "system-prompt") fitHeight(target);
    });
  }

  makeFields() {
    for (const [name, { low, high, step }] of Object.entries(PARAMETERS)) {
      const mode = step < 1 ? "decimal" : "numeric";
      const input = el("input", { id: `set-${name}`, type: "number", min: low, max: high, step, inputMode: mode });
      input.addEventListener("input", () => this.readNumber(name, input));
      const hint = el("span", { class: "field-error", id: `error-${name}`, hidden: true });
      input.setAttribute("aria-describedby", hint.id);
      const label = el("label", { htmlFor: input.id });
      label.dataset.t = `settings.${name}`;
      byId("parameters").append(el("div", { class: "field" }, label, input, hint));
      this.inputs.set(name, input);
    }
    translate(this.panel);
  }

  /** Takes a number when it is in range; one that is not is marked and left out. */
  readNumber(name, input) {
    const { low, high, step } = PARAMETERS[name];
    const value = input.value === "" ? null : Number(input.value);
    const isWrong = input.validity.badInput || (value !== null && !(value >= low && value <= high && (step < 1 || Number.isInteger(value))));
    const error = byId(`error-${name}`);
    input.setAttribute("aria-invalid", String(isWrong));
    error.hidden = !isWrong;
    error.textContent = t("settings.out_of_range", { low: number(low, low % 1 ? 2 : 0), high: number(high) });
    delete this.settings.values[name];
    if (value !== null && !isWrong) this.settings.values[name] = value;
    this.onChange(this.settings);
  }

  /** Shows the settings of a conversation, which the panel then changes. */
  show(settings) {
    if (settings === this.settings) return; // what is being typed stays
    this.settings = settings;
    this.draw();
  }

  draw() {
    byId("system-prompt").value = this.settings.system;
    byId("thinking").value = this.settings.thinking;
    byId("show-tokens").checked = this.settings.showsTokens;
    for (const [name, input] of this.inputs) {
      input.value = this.settings.values[name] ?? "";
      input.placeholder = t(PARAMETERS[name].empty);
      input.removeAttribute("aria-invalid");
      byId(`error-${name}`).hidden = true;
    }
  }

  changed() {
    this.draw();
    this.onChange(this.settings);
  }

  toggle(isOpen) {
    this.panel.hidden = !isOpen;
    byId("open-settings").setAttribute("aria-expanded", String(isOpen));
    if (isOpen) {
      fitHeight(byId("system-prompt"));
      byId("close-settings").focus();
    } else {
      byId("open-settings").focus();
    }
  }
}
