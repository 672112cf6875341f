// The page put together: what is open, and what each button does.
import { newAnswer } from "./answer.js";
import { BatchView } from "./batch_view.js";
import { ChatView } from "./chat_view.js";
import { Composer } from "./composer.js";
import { newConversation, requestBody, titleOf } from "./conversation.js";
import { byId, oncePerFrame } from "./dom.js";
import { currentLanguage, onLanguage, setLanguage, t, translate } from "./i18n.js";
import { LiveLine } from "./live.js";
import { copyCode } from "./message_view.js";
import { Monitor } from "./monitor.js";
import { Runs } from "./runs.js";
import { ServerState, showToast } from "./server_state.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { TokenBox } from "./tokens.js";

const LIVE_MS = 200;

class App {
  constructor() {
    this.store = new Store(() => showToast(t("notice.storage")));
    this.active = this.store.list()[0] ?? newConversation(this.store.settings());
    this.server = new ServerState(() => this.drawState());
    this.runs = new Runs((conversation, message) => this.answerMoved(conversation, message));
    this.chat = new ChatView(this.messageActions(), new TokenBox(byId("token-box")));
    this.composer = new Composer({ send: (text) => this.send(text), stop: () => this.runs.stop(this.active.id) });
    this.live = new LiveLine(byId("live"));
    this.settings = new Settings((settings) => this.settingsChanged(settings), () => this.server.ask());
    this.sidebar = new Sidebar(this.store, this.sidebarActions());
    this.batch = new BatchView(this.batchActions(), new Monitor());
    this.drawLive = oncePerFrame(() => this.live.draw(this.runs.meter(this.active.id)));
    this.listen();
    this.openConversation(this.active);
    this.showView();
    this.server.ask();
  }

  listen() {
    // Else answers that are cut off by leaving the page would be kept as failed ones.
    for (const event of ["beforeunload", "pagehide"]) addEventListener(event, () => this.runs.stopAll());
    addEventListener("hashchange", () => this.showView());
    addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("click", ({ target }) => copyCode(target));
    setInterval(() => this.runs.has(this.active.id) && this.drawLive(), LIVE_MS);
    this.store.onOtherTab((id, load) => this.otherTabChanged(id, load));
    onLanguage(() => {
      this.openConversation(this.active);
      this.drawState();
    });
    const language = byId("language");
    language.value = currentLanguage();
    language.addEventListener("change", () => setLanguage(language.value));
    const theme = byId("theme");
    theme.value = localStorage.getItem("photon.theme") ?? "";
    theme.addEventListener("change", () => {
      localStorage.setItem("photon.theme", theme.value);
      document.documentElement.dataset.theme = theme.value;
      dispatchEvent(new Event("photon-theme"));
    });
  }

  onKey(event) {
    if (event.key !== "Escape" || event.defaultPrevented) return;
    if (document.body.classList.contains("has-drawer")) this.sidebar.toggle(false);
    else if (this.isBatch && this.batch.isRunning) this.batch.stop();
    else if (this.runs.has(this.active.id)) this.runs.stop(this.active.id);
    else if (!byId("settings").hidden) this.settings.toggle(false);
  }

  get isBatch() {
    return location.hash === "#batch";
  }

  /** Shows the chat or the batch view, as the address says. */
  showView() {
    byId("chat-view").hidden = this.isBatch;
    byId("batch-view").hidden = !this.isBatch;
    byId("show-batch").hidden = this.isBatch;
    byId("show-chat").hidden = !this.isBatch;
    if (this.isBatch) this.batch.show();
    else this.batch.hide();
    this.drawTitle();
  }

  openConversation(conversation) {
    this.active = conversation;
    this.chat.show(conversation);
    this.settings.show(conversation.settings);
    this.composer.open(conversation.id);
    this.drawState();
    this.sidebar.draw();
    this.drawTitle();
  }

  drawTitle() {
    const title = this.isBatch ? t("batch.title") : titleOf(this.active);
    byId("title").textContent = title;
    document.title = `${title} · photon_jax`;
  }

  drawState() {
    this.server.draw();
    this.composer.setState(this.server.isReady, this.runs.has(this.active.id));
    this.batch.draw();
    this.drawLive();
  }

  answerMoved(conversation, message) {
    const hasEnded = message.state !== "running";
    const isActive = conversation === this.active;
    if (hasEnded) {
      conversation.updatedAt = Date.now();
      this.save(conversation);
      this.sidebar.draw();
      if (message.error?.kind === "network" || message.error?.kind === "busy") this.server.ask();
    } else if (this.store.conversations.has(conversation.id)) {
      this.store.saveSoon(conversation);
    }
    if (!isActive) return;
    this.chat.update(message);
    this.drawLive();
    if (!hasEnded) return;
    this.drawState();
    byId("announcer").textContent = t("message.ended");
  }

  /** Keeps a conversation, unless it was deleted while its answer ran. */
  save(conversation) {
    if (this.store.conversations.has(conversation.id)) this.store.save(conversation);
  }

  send(text) {
    this.active.messages.push({ role: "user", content: text });
    this.answer();
  }

  /** Asks for an answer to the messages of the open conversation. */
  answer() {
    const conversation = this.active;
    const body = requestBody(this.server.model, conversation.settings, conversation.messages);
    const message = newAnswer();
    conversation.messages.push(message);
    this.begin(conversation, message, body);
  }

  begin(conversation, message, body) {
    conversation.updatedAt = Date.now();
    this.store.save(conversation);
    this.runs.start(conversation, message, body);
    this.openConversation(conversation);
    this.chat.scrollToEnd();
    byId("announcer").textContent = t("message.started");
  }

  /** Returns the place of a message in the open conversation once nothing runs there; -1 when the server can't answer. */
  placeOf(message) {
    if (!this.server.isReady || this.runs.has(this.active.id)) return -1;
    return this.active.messages.indexOf(message);
  }

  messageActions() {
    return {
      edit: (message, text) => {
        const place = this.placeOf(message);
        if (place < 0) return;
        this.active.messages.splice(place);
        this.send(text);
      },
      again: (message) => {
        const place = this.placeOf(message);
        if (place < 0) return;
        this.active.messages.splice(place);
        this.answer();
      },
      continue: (message) => this.continueAnswer(message),
      saveText: (message, text) => {
        Object.assign(message, { content: text, tokens: [] });
        this.save(this.active);
        this.openConversation(this.active);
      },
    };
  }

  continueAnswer(message) {
    const place = this.placeOf(message);
    if (place < 0) return;
    this.active.messages.splice(place + 1);
    if (!this.active.settings.showsTokens) message.tokens = [];
    const body = requestBody(this.server.model, this.active.settings, this.active.messages);
    this.begin(this.active, message, body);
  }

  settingsChanged(settings) {
    this.store.saveSettings(settings);
    this.save(this.active);
  }

  sidebarActions() {
    return {
      open: (id) => this.goTo(this.store.conversations.get(id)),
      create: () => this.goTo(newConversation(this.store.settings())),
      remove: (id) => this.remove(id),
      renamed: () => this.drawTitle(),
      isRunning: (id) => this.runs.has(id),
      activeId: () => this.active.id,
      imported: (n) => showToast(t("sidebar.imported", { n })),
      importFailed: () => showToast(t("error.import")),
    };
  }

  /** Shows a conversation in the chat view. */
  goTo(conversation) {
    if (this.isBatch) location.hash = "";
    this.sidebar.toggle(false);
    this.openConversation(conversation);
    this.composer.focus();
  }

  remove(id) {
    const removed = this.store.conversations.get(id);
    this.runs.stop(id);
    this.store.remove(id);
    if (removed === this.active) this.openConversation(this.store.list()[0] ?? newConversation(this.store.settings()));
    this.sidebar.draw();
    showToast(t("sidebar.deleted", { title: titleOf(removed) }), t("sidebar.undo"), () => {
      this.store.save(removed);
      this.openConversation(removed);
    });
  }

  otherTabChanged(id, load) {
    if (this.runs.has(id)) return;
    load();
    const now = this.store.conversations.get(id);
    if (id === this.active.id && now) this.openConversation(now);
    else this.sidebar.draw();
  }

  batchActions() {
    return {
      model: () => this.server.model,
      settings: () => this.active.settings,
      isReady: () => this.server.isReady,
      keep: (conversation) => {
        this.store.save(conversation);
        this.goTo(conversation);
      },
    };
  }
}

translate(document);
new App();
