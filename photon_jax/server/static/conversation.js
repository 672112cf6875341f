// Conversations as plain data, and the request that asks for the next answer of one.
import { t } from "./i18n.js";

/** The parameters of a request that the settings hold; an empty one is left to the server. */
export const PARAMETERS = {
  temperature: { low: 0, high: 100, step: 0.1, empty: "settings.default" },
  top_p: { low: 0, high: 1, step: 0.05, empty: "settings.default" },
  top_k: { low: 0, high: 1000000, step: 1, empty: "settings.default" },
  min_p: { low: 0, high: 1, step: 0.01, empty: "settings.default" },
  max_tokens: { low: 1, high: 1000000, step: 1, empty: "settings.room" },
  seed: { low: 0, high: 2 ** 53 - 1, step: 1, empty: "settings.random" },
  repetition_penalty: { low: 0.01, high: 100, step: 0.05, empty: "settings.default" },
  presence_penalty: { low: -2, high: 2, step: 0.1, empty: "settings.default" },
  frequency_penalty: { low: -2, high: 2, step: 0.1, empty: "settings.default" },
};

export function newSettings() {
  return { system: "", thinking: "", showsTokens: false, values: {} };
}

export function newConversation(settings) {
  const now = Date.now();
  const id = `${now.toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  return { id, title: "", createdAt: now, updatedAt: now, settings: structuredClone(settings), messages: [] };
}

/** Returns the title that was given, or the beginning of the first message. */
export function titleOf(conversation) {
  const first = conversation.title || conversation.messages.find((message) => message.role === "user")?.content || "";
  const line = first.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || t("chat.untitled");
}

export function matches(conversation, query) {
  const wanted = query.trim().toLowerCase();
  const texts = [titleOf(conversation), ...conversation.messages.map((message) => message.content)];
  return texts.some((text) => text.toLowerCase().includes(wanted));
}

function settingsFields(settings) {
  const fields = { ...settings.values };
  if (settings.thinking) fields.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.showsTokens) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  return fields;
}

function sentMessage(message) {
  const sent = { role: message.role, content: message.content };
  if (message.reasoning) sent.reasoning = message.reasoning;
  return sent;
}

/** Returns the body that asks for an answer to the messages, or for more of the last one when that is an answer. */
export function requestBody(model, settings, messages) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = {
    model,
    messages: [...system, ...messages.filter((message) => message.content || message.reasoning).map(sentMessage)],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_progress: true,
    ...settingsFields(settings),
  };
  const isContinued = messages.at(-1).role === "assistant";
  return isContinued ? { ...body, continue_final_message: true, add_generation_prompt: false } : body;
}

function readText(value) {
  return typeof value === "string" ? value : "";
}

function readMessage(value) {
  if (value.role === "user") return { role: "user", content: readText(value.content) };
  if (value.role !== "assistant") throw new TypeError("a message has no known role");
  const state = value.state === "running" ? "stopped" : ["done", "stopped", "failed"].find((name) => name === value.state);
  return {
    role: "assistant",
    content: readText(value.content),
    reasoning: readText(value.reasoning),
    state: state ?? "done",
    finish: value.finish ?? null,
    error: value.error ?? null,
    stats: value.stats ?? null,
    tokens: Array.isArray(value.tokens) ? value.tokens : [],
  };
}

function readSettings(value) {
  const known = Object.keys(PARAMETERS).filter((name) => typeof value?.values?.[name] === "number");
  return {
    system: readText(value?.system),
    thinking: readText(value?.thinking),
    showsTokens: value?.showsTokens === true,
    values: Object.fromEntries(known.map((name) => [name, value.values[name]])),
  };
}

/** Returns a conversation that was stored or exported, with what is missing filled in; throws when it is none. */
export function readConversation(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.messages)) throw new TypeError("not a conversation");
  return {
    id: value.id,
    title: readText(value.title),
    createdAt: Number(value.createdAt) || Date.now(),
    updatedAt: Number(value.updatedAt) || Date.now(),
    settings: readSettings(value.settings),
    messages: value.messages.map(readMessage),
  };
}
