// Language of the page: the browser's at first, then the one that was chosen.
import { WORDS } from "./words.js";

const KEY = "photon.language";
const listeners = [];

function preferred() {
  const saved = localStorage.getItem(KEY);
  if (saved in WORDS) return saved;
  return navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

let language = preferred();

export function currentLanguage() {
  return language;
}

/** Calls `listener` after each change of the language. */
export function onLanguage(listener) {
  listeners.push(listener);
}

export function setLanguage(name) {
  language = name;
  localStorage.setItem(KEY, name);
  translate(document);
  for (const listener of listeners) listener();
}

/** Returns the text of a key with its {names} filled in. */
export function t(key, values = {}) {
  const text = WORDS[language][key] ?? WORDS.en[key];
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/** Returns a number as the language writes it. */
export function number(value, digits = 0) {
  return value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Returns a rate with three digits or so: 0, 4.21, 42.1, 421, 4,210. */
export function rate(value) {
  return number(value, value === 0 ? 0 : value < 10 ? 2 : value < 100 ? 1 : 0);
}

/** Fills in the texts of elements that name them: data-t, data-t-label, data-t-placeholder. */
export function translate(root) {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const node of root.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  for (const node of root.querySelectorAll("[data-t-label]")) {
    node.setAttribute("aria-label", t(node.dataset.tLabel));
    node.title = t(node.dataset.tLabel);
  }
  for (const node of root.querySelectorAll("[data-t-placeholder]")) node.placeholder = t(node.dataset.tPlaceholder);
}
