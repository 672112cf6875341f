// Answers as they stream in: chunks are folded into their messages.
import { ApiError, streamChat } from "./api.js";
import { Meter } from "./meter.js";

/** Returns a message of the model that has not begun. */
export function newAnswer() {
  return { role: "assistant", content: "", reasoning: "", state: "running", finish: null, error: null, stats: null, tokens: [] };
}

/** Takes what a chunk says of one answer. */
function foldChoice(message, choice, meter) {
  message.content += choice.delta?.content ?? "";
  message.reasoning += choice.delta?.reasoning ?? "";
  for (const entry of choice.logprobs?.content ?? []) {
    message.tokens.push([entry.token, entry.logprob, entry.top_logprobs.map((top) => [top.token, top.logprob])]);
  }
  message.finish = choice.finish_reason ?? message.finish;
  if (choice.token_ids) meter.output(meter.tokens + choice.token_ids.length);
  if (choice.finish_reason) meter.end();
}

/** Takes what a chunk says of the whole request; its output tokens are those of one answer alone. */
function foldCounts({ prompt_progress: progress, usage }, meters) {
  const [meter] = meters;
  if (progress) for (const each of meters) each.prompt(progress.total, progress.processed, progress.cache);
  if (meters.length > 1 || !(usage?.completion_tokens > 0)) return;
  meter.prompt(usage.prompt_tokens, usage.prompt_tokens, usage.prompt_tokens_details?.cached_tokens ?? 0);
  meter.output(usage.completion_tokens);
}

function describeError(error) {
  if (error instanceof ApiError) return { kind: error.kind, message: error.message };
  console.error(error);
  return { kind: "server", message: String(error) };
}

/**
 * Runs a request and folds its answers, one or several, into `messages`, which may have begun before; never throws.
 * `onChange(meters)` is called after each chunk and at the end; there is a meter for each message.
 */
export async function runAnswers(messages, body, signal, onChange) {
  const meters = messages.map(() => new Meter());
  for (const message of messages) Object.assign(message, { state: "running", finish: null, error: null });
  onChange(meters);
  let error = null;
  try {
    for await (const chunk of streamChat(body, signal)) {
      foldCounts(chunk, meters);
      for (const choice of chunk.choices ?? []) foldChoice(messages[choice.index], choice, meters[choice.index]);
      onChange(meters);
    }
  } catch (cause) {
    error = signal.aborted ? null : describeError(cause);
  }
  messages.forEach((message, index) => {
    message.state = message.finish ? "done" : error ? "failed" : "stopped";
    message.error = message.finish ? null : error;
    meters[index].end();
    message.stats = meters[index].summary();
  });
  onChange(meters);
}
