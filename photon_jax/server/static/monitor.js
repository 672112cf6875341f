// The engine at work: asks the server for its numbers several times a second and draws them.
import { stats } from "./api.js";
import { drawBlocks, drawRates, drawSlots } from "./charts.js";
import { byId } from "./dom.js";
import { number, rate, t } from "./i18n.js";

const POLL_MS = 250;
const SPAN_S = 30; // of the throughput that is shown

export class Monitor {
  constructor() {
    this.timer = null;
    this.isOn = false;
    this.now = null; // the latest numbers
    this.places = new Map(); // request id -> the column in which its slot is drawn, from its begin to its end
    this.history = []; // [time, output tokens/s, prompt tokens/s]
    for (const event of ["resize", "photon-theme"]) addEventListener(event, () => this.draw());
  }

  start() {
    if (this.isOn) return;
    this.isOn = true;
    this.poll();
  }

  stop() {
    this.isOn = false;
    clearTimeout(this.timer);
  }

  async poll() {
    try {
      if (!document.hidden) this.take(await stats());
    } catch {
      this.now = null; // the page says elsewhere that the server does not answer
    }
    if (this.isOn) this.timer = setTimeout(() => this.poll(), POLL_MS);
  }

  take(numbers) {
    const time = performance.now() / 1000;
    this.now = numbers;
    this.placeSlots(numbers.slots);
    this.history.push([time, numbers.output_tokens_per_s, numbers.prompt_tokens_per_s]);
    this.history = this.history.filter(([at]) => time - at < SPAN_S + 2);
    this.draw();
  }

  /** Gives each new slot the first free column. */
  placeSlots(slots) {
    const ids = new Set(slots.map((slot) => slot.request_id));
    for (const id of [...this.places.keys()]) if (!ids.has(id)) this.places.delete(id);
    const taken = new Set(this.places.values());
    let free = 0;
    for (const id of ids) {
      if (this.places.has(id)) continue;
      while (taken.has(free)) free += 1;
      taken.add(free);
      this.places.set(id, free);
    }
  }

  draw() {
    if (!this.isOn || this.now === null) return;
    const { now } = this;
    const columns = [];
    for (const slot of now.slots) columns[this.places.get(slot.request_id)] = slot;
    const numUsed = now.num_blocks - now.num_free_blocks;
    drawSlots(byId("slots-canvas"), columns, now.max_num_seqs);
    drawBlocks(byId("blocks-canvas"), numUsed, now.num_cached_blocks, now.num_blocks);
    drawRates(byId("rates-canvas"), this.history, this.history.at(-1)[0], SPAN_S);
    const slots = { n: number(now.num_running), all: number(now.max_num_seqs), waiting: number(now.num_waiting) };
    byId("slots-now").textContent = t("batch.slots_now", slots);
    const blocks = { n: number(numUsed), all: number(now.num_blocks), cached: number(now.num_cached_blocks) };
    byId("blocks-now").textContent = t("batch.blocks_now", blocks);
    const rates = { out: rate(now.output_tokens_per_s), in: rate(now.prompt_tokens_per_s) };
    byId("rates-now").textContent = t("batch.rate_now", rates);
  }
}
