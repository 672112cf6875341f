// Conversations kept in the browser, each under a key of its own in localStorage.
import { matches, newConversation, newSettings, readConversation } from "./conversation.js";

const PREFIX = "photon.chat.";
const SETTINGS_KEY = "photon.settings";
const SAVE_EVERY_MS = 1000;
const FORMAT = "photon_jax chats";

export class Store {
  /** `onFull` is called when the browser keeps no more. */
  constructor(onFull) {
    this.onFull = onFull;
    this.conversations = new Map();
    this.timers = new Map();
    for (const key of Object.keys(localStorage)) if (key.startsWith(PREFIX)) this.load(key);
    addEventListener("pagehide", () => this.flush());
  }

  /** Takes the conversation as it is stored now; returns its id, or null where there is none that can be read. */
  load(key) {
    const id = key.slice(PREFIX.length);
    try {
      this.conversations.set(id, readConversation(JSON.parse(localStorage.getItem(key))));
    } catch {
      this.conversations.delete(id); // what is stored stays as it is
    }
    return this.conversations.has(id) ? id : null;
  }

  /** Calls `listener(id)` when another tab changed a conversation. */
  onOtherTab(listener) {
    addEventListener("storage", ({ key }) => {
      if (key?.startsWith(PREFIX)) listener(key.slice(PREFIX.length), () => this.load(key));
    });
  }

  /** Returns the conversations that hold the query, the latest first. */
  list(query = "") {
    const found = [...this.conversations.values()].filter((conversation) => matches(conversation, query));
    return found.sort((a, b) => b.updatedAt - a.updatedAt);
  }

  save(conversation) {
    clearTimeout(this.timers.get(conversation.id));
    this.timers.delete(conversation.id);
    this.conversations.set(conversation.id, conversation);
    this.write(PREFIX + conversation.id, conversation);
  }

  /** Saves soon, and not more often than once a second: while an answer streams. */
  saveSoon(conversation) {
    if (this.timers.has(conversation.id)) return;
    this.timers.set(conversation.id, setTimeout(() => this.save(conversation), SAVE_EVERY_MS));
  }

  flush() {
    for (const id of [...this.timers.keys()]) this.save(this.conversations.get(id));
  }

  remove(id) {
    clearTimeout(this.timers.get(id));
    this.timers.delete(id);
    this.conversations.delete(id);
    localStorage.removeItem(PREFIX + id);
  }

  write(key, value) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
    } catch {
      if (this.forgetTokens()) this.write(key, value);
      else this.onFull();
    }
  }

  /** Makes room: drops the tokens' probabilities of the oldest conversation that has any. Returns whether one had. */
  forgetTokens() {
    const oldest = this.list().findLast(({ messages }) => messages.some((message) => message.tokens?.length > 0));
    if (!oldest) return false;
    for (const message of oldest.messages) if (message.tokens) message.tokens = [];
    localStorage.removeItem(PREFIX + oldest.id);
    this.write(PREFIX + oldest.id, oldest);
    return true;
  }

  /** Returns the settings that new conversations begin with. */
  settings() {
    try {
      return { ...newSettings(), ...JSON.parse(localStorage.getItem(SETTINGS_KEY)) };
    } catch {
      return newSettings();
    }
  }

  saveSettings(settings) {
    this.write(SETTINGS_KEY, settings);
  }

  exportText(conversations) {
    return JSON.stringify({ format: FORMAT, conversations }, null, 1);
  }

  /** Adds the conversations of an exported file, as copies where they exist; returns how many, throws on others. */
  importText(text) {
    const file = JSON.parse(text);
    if (file.format !== FORMAT) throw new TypeError("not a file of chats");
    const read = file.conversations.map(readConversation);
    for (const conversation of read) {
      const isTaken = this.conversations.has(conversation.id);
      this.save(isTaken ? { ...conversation, id: newConversation(newSettings()).id } : conversation);
    }
    return read.length;
  }
}
