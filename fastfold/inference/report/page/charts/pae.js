// The aligned error of all pairs of residues, and what both kinds of charts share: ticks, chains, pointing and dragging.

const MARK = '#d6604d';
const PIN = '#000000';
const ROWS = '#e08214';
const COLUMNS = '#762a83';

// Numbers at the axis: the first residue of each chain and of each part of it, and round ones in between.
function ticksOf(prediction) {
  const steps = [1, 2, 5].flatMap((s) => [0, 1, 2, 3, 4, 5, 6].map((p) => s * 10 ** p)).sort((a, b) => a - b);
  const step = steps.find((one) => prediction.length <= 10 * one) || 1e7;
  const ticks = [];
  for (const chain of prediction.chains) {
    chain.numbers.forEach((label, place) => {
      const at = chain.start + place;
      const text = String(chain.labels[place]);
      const last = ticks[ticks.length - 1];
      const head = place === 0 || label !== chain.numbers[place - 1] + 1;
      if (head) {
        if (last && at - last.at < 0.4 * step && !last.head) ticks.pop();
        const before = ticks[ticks.length - 1];
        if (!before || at - before.at >= 0.4 * step) ticks.push({ at, label, text, head });
      } else if (label % step === 0 && (!last.head || last.label === 1 || at - last.at >= 0.4 * step)) ticks.push({ at, label, text });
    });
  }
  return ticks;
}

// Pointing and dragging: `at` turns a place on the canvas into residues, or null outside.
function listen(canvas, at, { hover, drag }) {
  let start = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener('pointerdown', (event) => {
    start = at(...place(event), false);
    if (start) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener('pointermove', (event) => {
    const found = at(...place(event), start !== null);
    hover(found);
    if (start && found) drag(start, found, false);
  });
  canvas.addEventListener('pointerup', (event) => {
    const found = start && at(...place(event), true);
    if (found) drag(start, found, true);
    start = null;
  });
  canvas.addEventListener('pointercancel', () => { start = null; });
  canvas.addEventListener('pointerleave', () => { if (!start) hover(null); });
}

// A bar in the colour of each chain with its name above, where there are several.
function nameChains(context, { chains }, x, top) {
  if (chains.length < 2) return;
  context.textAlign = 'center';
  chains.forEach((chain, number) => {
    const [from, to] = [x(chain.start), x(chain.start + chain.length)];
    context.fillStyle = chainColour(number);
    context.fillRect(from, top - 5, to - from - 1, 4);
    context.fillStyle = token('ink');
    if (to - from > 8) context.fillText(chain.name, (from + to) / 2, top - 8);
  });
}

const PAE_EDGE = { left: 52, top: 20, right: 12, bottom: 40 };

class PaeChart {
  constructor(canvas, events) {
    this.canvas = canvas;
    listen(canvas, (x, y, clamp) => this.residuesAt(x, y, clamp), events);
  }

  show(prediction) {
    this.prediction = prediction;
    this.canvas.hidden = !prediction.pae;
    if (!prediction.pae) return;
    const { side, bytes, step, max } = prediction.pae;
    const image = new ImageData(side, side);
    const stops = meta.style.pae.map(rgb);
    const table = new Uint8ClampedArray(4 * 256).fill(255);
    for (let value = 0; value < 256; value++) {
      const place = Math.min(1, (value * step) / max) * (stops.length - 1);
      const low = Math.min(Math.floor(place), stops.length - 2);
      const colour = stops[low].map((from, axis) => from + (place - low) * (stops[low + 1][axis] - from));
      table.set(colour, 4 * value);
    }
    const [pixels, colours] = [new Uint32Array(image.data.buffer), new Uint32Array(table.buffer)];
    for (let k = 0; k < side * side; k++) pixels[k] = colours[bytes[k]];
    this.image = document.createElement('canvas');
    this.image.width = this.image.height = side;
    this.image.getContext('2d').putImageData(image, 0, 0);
  }

  // Rows are the residues that are aligned on, columns those that are scored.
  residuesAt(x, y, clamp) {
    if (!this.prediction || !this.prediction.pae) return null;
    const n = this.prediction.length;
    const place = [y - PAE_EDGE.top, x - PAE_EDGE.left].map((value) => Math.floor((value / this.size) * n));
    if (!clamp && place.some((value) => value < 0 || value >= n)) return null;
    return place.map((value) => Math.max(0, Math.min(n - 1, value)));
  }

  error(row, column) {
    const { side, stride, bytes, step } = this.prediction.pae;
    return bytes[Math.floor(row / stride) * side + Math.floor(column / stride)] * step;
  }

  draw(state) {
    const { prediction } = this;
    if (!prediction || !prediction.pae) return;
    const wide = this.canvas.clientWidth || 400;
    const size = wide - PAE_EDGE.left - PAE_EDGE.right;
    this.canvas.style.height = `${size + PAE_EDGE.top + PAE_EDGE.bottom}px`;
    const { context } = fit(this.canvas);
    const { left, top } = PAE_EDGE;
    const n = prediction.length;
    const to = (residue) => (residue / n) * size;
    this.size = size;
    context.imageSmoothingEnabled = false;
    const { side, stride } = prediction.pae;
    context.save();
    context.beginPath();
    context.rect(left, top, size, size);
    context.clip();
    context.drawImage(this.image, left, top, to(side * stride), to(side * stride));
    if (state.block) {
      const [rows, columns] = [state.block.rows, state.block.columns];
      context.fillStyle = 'rgba(255, 255, 255, 0.45)';
      context.beginPath();
      context.rect(left, top, size, size);
      context.rect(left + to(columns[0]), top + to(rows[0]), to(columns[1] - columns[0] + 1), to(rows[1] - rows[0] + 1));
      context.fill('evenodd');
      context.lineWidth = 2;
      context.strokeStyle = COLUMNS;
      context.strokeRect(left + to(columns[0]), top + to(rows[0]), to(columns[1] - columns[0] + 1), to(rows[1] - rows[0] + 1));
      context.fillStyle = ROWS;
      context.fillRect(left, top + to(rows[0]), 5, to(rows[1] - rows[0] + 1));
      context.fillStyle = COLUMNS;
      context.fillRect(left + to(columns[0]), top, to(columns[1] - columns[0] + 1), 5);
    }
    context.restore();
    context.strokeStyle = MARK;
    context.lineWidth = 1;
    prediction.chains.slice(1).forEach((chain) => {
      line(context, left + to(chain.start), top, left + to(chain.start), top + size);
      line(context, left, top + to(chain.start), left + size, top + to(chain.start));
    });
    nameChains(context, prediction, (at) => left + to(at), top);
    context.fillStyle = token('soft');
    for (const tick of ticksOf(prediction)) {
      context.textAlign = 'center';
      context.fillText(tick.text, left + to(tick.at + 0.5), top + size + 14);
      context.textAlign = 'right';
      context.fillText(tick.text, left - 5, top + to(tick.at + 0.5) + 4);
    }
    context.textAlign = 'center';
    context.fillText('scored residue', left + size / 2, top + size + 30);
    upright(context, 'aligned residue', 12, top + size / 2);
    context.strokeStyle = token('edge');
    context.strokeRect(left, top, size, size);
    for (const [residue, colour] of [[state.pin, PIN], [state.hover, MARK]]) {
      if (residue === null) continue;
      context.strokeStyle = colour;
      context.setLineDash([4, 3]);
      line(context, left + to(residue + 0.5), top, left + to(residue + 0.5), top + size);
      line(context, left, top + to(residue + 0.5), left + size, top + to(residue + 0.5));
      context.setLineDash([]);
    }
  }
}
