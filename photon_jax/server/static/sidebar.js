// The list of conversations: open, rename, delete, search, export, import.
import { byId, el, iconButton } from "./dom.js";
import { t } from "./i18n.js";
import { titleOf } from "./conversation.js";

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export class Sidebar {
  /** `actions` has open(id), create(), remove(id), renamed(), isRunning(id), activeId(), imported(n), importFailed(). */
  constructor(store, actions) {
    this.store = store;
    this.actions = actions;
    this.renaming = null;
    this.list = byId("conversations");
    this.search = byId("search");
    this.search.addEventListener("input", () => this.draw());
    byId("new-chat").addEventListener("click", () => actions.create());
    byId("export-all").addEventListener("click", () => this.export(store.list(), "photon-chats.json"));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.import(event.target));
    byId("open-sidebar").addEventListener("click", () => this.toggle(true));
    byId("close-sidebar").addEventListener("click", () => this.toggle(false));
    byId("shade").addEventListener("click", () => this.toggle(false));
  }

  /** Opens or closes the drawer that the list is on a phone. */
  toggle(isOpen) {
    document.body.classList.toggle("has-drawer", isOpen);
    byId("open-sidebar").setAttribute("aria-expanded", String(isOpen));
    if (isOpen) byId("close-sidebar").focus();
  }

  draw() {
    const conversations = this.store.list(this.search.value);
    const none = t(this.search.value ? "sidebar.not_found" : "sidebar.none");
    const items = conversations.map((conversation) => this.item(conversation));
    this.list.replaceChildren(...(items.length > 0 ? items : [el("li", { class: "none" }, none)]));
  }

  item(conversation) {
    const { id } = conversation;
    if (this.renaming === id) return el("li", {}, this.renameForm(conversation));
    const isActive = this.actions.activeId() === id;
    const open = el("button", { type: "button", class: "open-chat", onclick: () => this.open(id) }, titleOf(conversation));
    if (isActive) open.setAttribute("aria-current", "true");
    if (this.actions.isRunning(id)) {
      open.append(el("span", { class: "running-dot", role: "img", "aria-label": t("sidebar.running") }));
    }
    const rename = iconButton("edit", t("sidebar.rename"), () => {
      this.renaming = id;
      this.draw();
    });
    const save = () => this.export([conversation], `photon-chat-${id}.json`);
    const buttons = [rename, iconButton("export", t("sidebar.export"), save)];
    buttons.push(iconButton("delete", t("sidebar.delete"), () => this.actions.remove(id)));
    return el("li", { class: isActive ? "is-active" : "" }, open, el("div", { class: "item-actions" }, ...buttons));
  }

  open(id) {
    this.toggle(false);
    this.actions.open(id);
  }

  renameForm(conversation) {
    const input = el("input", { value: titleOf(conversation), maxLength: 120, "aria-label": t("sidebar.rename") });
    const end = (isSaved) => {
      if (this.renaming === null) return;
      this.renaming = null;
      if (isSaved) this.store.save(Object.assign(conversation, { title: input.value.trim() }));
      this.draw();
      this.actions.renamed();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation(); // Escape ends the renaming alone
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key === "Escape") end(false);
    });
    input.addEventListener("blur", () => end(true));
    requestAnimationFrame(() => input.select());
    return input;
  }

  export(conversations, name) {
    download(name, this.store.exportText(conversations));
  }

  async import(input) {
    const [file] = input.files;
    try {
      this.actions.imported(this.store.importText(await file.text()));
    } catch {
      this.actions.importFailed();
    }
    input.value = "";
    this.draw();
  }
}
