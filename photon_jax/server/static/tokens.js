// Tokens of an answer, tinted by their probability; the one under the pointer shows what else was likely.
import { el } from "./dom.js";
import { number, t } from "./i18n.js";

const NUM_TINTS = 5;

function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return t("token.probability", { p: number(value, value < 10 ? 2 : 1) });
}

/** Returns how unlikely a token was, 0 (nearly sure) to NUM_TINTS - 1. */
function tint(logprob) {
  return Math.min(NUM_TINTS - 1, Math.floor(-logprob / 0.8));
}

/** Returns a token's text with blanks and breaks made visible. */
function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

function describe(node, [text, logprob, top]) {
  const rows = top.map(([other, value]) => {
    const bar = el("meter", { min: 0, max: 1, value: Math.exp(value), "aria-hidden": "true" });
    const kind = other === text ? "token-row is-chosen" : "token-row";
    return el("div", { class: kind }, el("code", {}, visible(other)), bar, el("span", {}, percent(value)));
  });
  const head = el("div", { class: "token-head" }, el("code", {}, visible(text)), el("span", {}, percent(logprob)));
  node.replaceChildren(head, el("div", { class: "token-caption" }, t("token.instead")), ...rows);
}

/** Puts the box beside a token, inside the window. */
function place(box, token) {
  const at = token.getClientRects()[0];
  const left = Math.max(8, Math.min(at.left, innerWidth - box.offsetWidth - 8));
  const isBelow = at.bottom + 8 + box.offsetHeight < innerHeight;
  box.style.left = `${left}px`;
  box.style.top = `${isBelow ? at.bottom + 6 : Math.max(8, at.top - 6 - box.offsetHeight)}px`;
}

/** Shows tokens in elements that are made by drawTokens; there is one for the page. */
export class TokenBox {
  constructor(node) {
    this.node = node;
    this.shown = null;
    addEventListener("scroll", () => this.hide(), true);
  }

  show(token, entry) {
    this.hide();
    this.shown = token;
    token.classList.add("is-shown");
    describe(this.node, entry);
    this.node.hidden = false;
    place(this.node, token);
  }

  hide() {
    this.shown?.classList.remove("is-shown");
    this.shown = null;
    this.node.hidden = true;
  }

  /** Draws the tokens that `element` does not hold yet; pointer and arrow keys show them one at a time. */
  drawTokens(element, entries) {
    const fresh = entries.slice(element.children.length);
    element.append(...fresh.map(([text, logprob]) => el("span", { class: `token tint-${tint(logprob)}` }, text)));
    element.tabIndex = 0;
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", t("token.help"));
    const indexOf = (node) => [...element.children].indexOf(node);
    const showAt = (index) => index >= 0 && this.show(element.children[index], entries[index]);
    element.onpointerover = ({ target }) => showAt(indexOf(target));
    element.onpointerleave = () => this.hide();
    element.onblur = () => this.hide();
    element.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape" && this.shown) {
        event.stopPropagation();
        this.hide();
      }
      if (!step) return;
      event.preventDefault();
      showAt(Math.max(0, Math.min(entries.length - 1, indexOf(this.shown) + step)));
    };
  }

  /** Undoes drawTokens. */
  clearTokens(element) {
    this.hide();
    element.replaceChildren();
    for (const name of ["tabindex", "role", "aria-label"]) element.removeAttribute(name);
    for (const name of ["onpointerover", "onpointerleave", "onblur", "onkeydown"]) element[name] = null;
  }
}
