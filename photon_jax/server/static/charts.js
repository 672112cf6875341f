// What the batch view draws: slots as columns, KV blocks as cells, throughput as an area. Colors are the style sheet's.

/** Returns the drawing context of a canvas whose pixels are the screen's, cleared, with its size in CSS pixels. */
function prepare(canvas) {
  const scale = devicePixelRatio;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const styles = getComputedStyle(canvas);
  const color = (name) => styles.getPropertyValue(`--chart-${name}`).trim();
  return { context, width, height, color };
}

function column(context, x, width, bottom, height, radius) {
  context.beginPath();
  context.roundRect(x, bottom - height, width, height, Math.min(radius, width / 2, height / 2));
  context.fill();
}

const SHORTEST_SCALE = 128; // tokens of a column as high as the canvas, at least

/** Draws slots as columns: the prompt's tokens below, the output's above; `columns` has holes where none runs. */
export function drawSlots(canvas, columns, numSlots) {
  const { context, width, height, color } = prepare(canvas);
  const step = width / Math.max(1, numSlots);
  const gap = step > 6 ? 2 : step > 2 ? 1 : 0;
  const scale = height / Math.max(SHORTEST_SCALE, ...columns.filter(Boolean).map((slot) => slot.num_tokens));
  for (let index = 0; index < numSlots; index += 1) {
    const draw = (name, tall) => {
      context.fillStyle = color(name);
      column(context, index * step, step - gap, height, tall, 2);
    };
    draw("free", height);
    const slot = columns[index];
    if (!slot) continue;
    draw("output", Math.max(3, slot.num_tokens * scale));
    draw("prompt", Math.max(2, (slot.num_tokens - slot.num_output_tokens) * scale));
  }
}

const [SMALLEST_CELL, LARGEST_CELL] = [5, 24]; // CSS pixels from one to the next

/** Draws the blocks as cells, several blocks to a cell where there are many: in use, then cached, then free. */
export function drawBlocks(canvas, used, cached, all) {
  const { context, width, height, color } = prepare(canvas);
  let pitch = LARGEST_CELL;
  while (pitch > SMALLEST_CELL && Math.floor(width / pitch) * Math.floor(height / pitch) < all) pitch -= 0.25;
  const [columns, rows] = [Math.max(1, Math.floor(width / pitch)), Math.max(1, Math.floor(height / pitch))];
  const cells = Math.min(all, columns * rows);
  const toCells = (blocks) => Math.ceil((blocks / Math.max(1, all)) * cells);
  const [usedCells, heldCells] = [toCells(used), toCells(used + cached)];
  for (let cell = 0; cell < cells; cell += 1) {
    const x = Math.floor(cell / rows) * pitch; // filled column by column
    const y = (cell % rows) * pitch;
    context.fillStyle = color(cell < usedCells ? "output" : cell < heldCells ? "prompt" : "free");
    context.fillRect(x, y, pitch - 1.5, pitch - 1.5);
  }
}

function area(context, points, height, fill, stroke) {
  if (points.length < 2) return;
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.strokeStyle = stroke;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(points.at(-1)[0], height);
  context.lineTo(points[0][0], height);
  context.fillStyle = fill;
  context.globalAlpha = 0.16;
  context.fill();
  context.globalAlpha = 1;
}

/** Draws rates over the last `span` seconds, newest at the right; `history` holds [time, output, prompt]. */
export function drawRates(canvas, history, now, span) {
  const { context, width, height, color } = prepare(canvas);
  const highest = Math.max(1, ...history.map(([, output]) => output)) * 1.1;
  const highestPrompt = Math.max(1, ...history.map(([, , prompt]) => prompt)) * 1.1;
  const at = (time) => width * (1 - (now - time) / span);
  context.fillStyle = color("free");
  for (const share of [0.25, 0.5, 0.75, 1]) context.fillRect(0, Math.min(height - 1, height * share), width, 1);
  const line = (pick, top) => history.map((entry) => [at(entry[0]), height - 1 - (pick(entry) / top) * (height - 3)]);
  area(context, line((entry) => entry[2], highestPrompt), height, color("prompt"), color("prompt"));
  area(context, line((entry) => entry[1], highest), height, color("output"), color("output"));
}
