// Speed of one answer: prompt progress, time to the first token, tokens per second.

const WINDOW_S = 3; // of the rate that is shown while tokens come

export class Meter {
  constructor(now = () => performance.now() / 1000) {
    this.now = now;
    this.startedAt = now();
    this.endedAt = null;
    this.firstAt = null;
    this.promptTokens = 0;
    this.promptDone = 0;
    this.cachedTokens = 0;
    this.tokens = 0;
    this.recent = []; // [time, tokens], of the last WINDOW_S
  }

  /** Takes what the server says about the prompt: tokens in all, computed, found in its cache. */
  prompt(all, done, cached) {
    this.promptTokens = all;
    this.promptDone = done;
    this.cachedTokens = cached;
  }

  /** Takes the number of output tokens so far. */
  output(tokens) {
    if (tokens <= this.tokens) return;
    const now = this.now();
    this.firstAt ??= now;
    this.tokens = tokens;
    this.recent.push([now, tokens]);
    while (this.recent.length > 2 && now - this.recent[0][0] > WINDOW_S) this.recent.shift();
  }

  end() {
    this.endedAt ??= this.now();
  }

  get seconds() {
    return (this.endedAt ?? this.now()) - this.startedAt;
  }

  /** Tokens per second of the last moments. */
  get liveRate() {
    const [first, last] = [this.recent[0], this.recent.at(-1)];
    return this.recent.length > 1 && last[0] > first[0] ? (last[1] - first[1]) / (last[0] - first[0]) : null;
  }

  /** Returns the numbers that are kept with the answer; null where there is none. */
  summary() {
    const first = this.firstAt === null ? null : this.firstAt - this.startedAt;
    const lastAt = this.recent.at(-1)?.[0];
    const isTimed = this.tokens > 1 && lastAt > this.firstAt;
    const computed = this.promptTokens - this.cachedTokens;
    return {
      prompt: this.promptTokens,
      cached: this.cachedTokens,
      tokens: this.tokens,
      first,
      rate: isTimed ? (this.tokens - 1) / (lastAt - this.firstAt) : null,
      promptRate: first && computed > 0 ? computed / first : null,
    };
  }
}
