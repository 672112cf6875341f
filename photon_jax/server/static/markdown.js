// Markdown to elements that can do no harm: marked parses, DOMPurify keeps a short list of tags, HTML stays text.
import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { icon } from "./dom.js";
import { t } from "./i18n.js";

const TAGS = ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote"];
const LIST_AND_TABLE_TAGS = ["ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a"];
const ALLOWED = {
  ALLOWED_TAGS: [...TAGS, ...LIST_AND_TABLE_TAGS],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

function escape(text) {
  const codes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => codes[character]);
}

const parser = new Marked({ gfm: true, breaks: true });
parser.use({
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escape(text)}</p>` : escape(text)),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`, // nothing is loaded from outside
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const purify = globalThis.DOMPurify;
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** Puts a code block in a frame with its language and a button, whose click copyCode handles. */
function frameCode(pre) {
  const language = /language-([\w+#-]+)/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "";
  const frame = document.createElement("div");
  frame.className = "code";
  const head = document.createElement("div");
  head.className = "code-head";
  const name = document.createElement("span");
  name.textContent = language;
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "icon-button copy-code";
  copy.setAttribute("aria-label", t("code.copy"));
  copy.title = t("code.copy");
  copy.append(icon("copy"));
  head.append(name, copy);
  pre.replaceWith(frame);
  pre.tabIndex = 0; // long lines scroll, also by keyboard
  frame.append(head, pre);
}

/** Lets a table that is too wide scroll by itself. */
function frameTable(table) {
  const frame = document.createElement("div");
  frame.className = "table";
  table.replaceWith(frame);
  frame.append(table);
}

/** Draws Markdown in `element`; blocks that did not change since the last time stay, so a selection in them does. */
export function renderMarkdown(element, text) {
  const fragment = purify.sanitize(parser.parse(text), ALLOWED);
  for (const pre of fragment.querySelectorAll("pre")) frameCode(pre);
  for (const table of fragment.querySelectorAll("table")) frameTable(table);
  const fresh = [...fragment.childNodes];
  let same = 0;
  while (same < fresh.length && element.childNodes[same]?.isEqualNode(fresh[same])) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...fresh.slice(same));
}
