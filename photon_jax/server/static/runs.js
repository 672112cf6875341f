// Answers that are being made, one at a time in each conversation, any number of conversations at once.
import { runAnswers } from "./answer.js";

export class Runs {
  /** `onChange(conversation, message)` is called whenever an answer moved, began or ended. */
  constructor(onChange) {
    this.onChange = onChange;
    this.running = new Map(); // conversation id -> {controller, meter}
  }

  has(id) {
    return this.running.has(id);
  }

  /** Returns the meter of the answer that runs in a conversation, or null. */
  meter(id) {
    return this.running.get(id)?.meter ?? null;
  }

  /** Runs a request whose answer goes into `message`; another one that runs in this conversation is stopped. */
  async start(conversation, message, body) {
    this.stop(conversation.id);
    const run = { controller: new AbortController(), meter: null };
    this.running.set(conversation.id, run);
    await runAnswers([message], body, run.controller.signal, ([meter]) => {
      run.meter = meter;
      const hasEnded = message.state !== "running";
      if (hasEnded && this.running.get(conversation.id) === run) this.running.delete(conversation.id);
      this.onChange(conversation, message);
    });
  }

  stop(id) {
    this.running.get(id)?.controller.abort();
  }

  stopAll() {
    for (const { controller } of this.running.values()) controller.abort();
  }
}
