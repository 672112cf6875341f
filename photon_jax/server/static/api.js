// The server's endpoints, and its errors as ApiError.
import { readEvents } from "./sse.js";

const KEY = "photon.api_key";

export class ApiError extends Error {
  /** kind: network, cut, key, busy, too_large, request or server; message: the server's own words, if any. */
  constructor(kind, message = "") {
    super(message);
    this.kind = kind;
  }
}

export function apiKey() {
  return localStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  localStorage.setItem(KEY, key);
}

function kindOf(status) {
  if (status === 401 || status === 403) return "key";
  if (status === 413) return "too_large";
  if (status === 429 || status === 503) return "busy";
  return status < 500 ? "request" : "server";
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  try {
    return await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("network");
  }
}

async function refuse(response) {
  const body = await response.json().catch(() => null);
  throw new ApiError(kindOf(response.status), body?.error?.message ?? response.statusText);
}

/** Returns {phase, message, model}; phase is "offline" when there is no server. */
export async function health() {
  try {
    return await (await call("api/health")).json();
  } catch {
    return { phase: "offline", message: "", model: "" };
  }
}

/** Returns what the engine does right now. */
export async function stats() {
  const response = await call("api/stats");
  if (!response.ok) await refuse(response);
  return response.json();
}

/** Yields the chunks of a streamed chat completion. */
export async function* streamChat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) await refuse(response);
  try {
    for await (const data of readEvents(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.code === 503 ? "busy" : "server", chunk.error.message);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("cut");
  }
  throw new ApiError("cut");
}
