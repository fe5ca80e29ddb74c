// Canvases: the aligned error of all pairs, and values along the chains. Both tell where a person points and drags.

const MARK = '#d6604d';
const ROWS = '#e08214';
const COLUMNS = '#762a83';

// A canvas in the pixels of the screen; returns its context and its size in CSS pixels.
function fit(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 600;
  const tall = height || canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(tall * ratio);
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.font = '11px ' + meta.style.fonts.map((font) => (font.includes(' ') ? `"${font}"` : font)).join(', ');
  return { context, width, height: tall };
}

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

const PAE_EDGE = { left: 52, top: 20, right: 64, bottom: 40 };

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
    const { context, width } = fit(this.canvas, size + PAE_EDGE.top + PAE_EDGE.bottom);
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
    context.textAlign = 'center';
    prediction.chains.forEach((chain, number) => {
      if (number) {
        line(context, left + to(chain.start), top, left + to(chain.start), top + size);
        line(context, left, top + to(chain.start), left + size, top + to(chain.start));
      }
      if (prediction.chains.length > 1 && to(chain.length) > 8) {
        bold(context, chain.name, left + to(chain.start + chain.length / 2), top - 6, chainColour(number));
      }
    });
    context.fillStyle = meta.style.ink;
    for (const tick of ticksOf(prediction)) {
      context.textAlign = 'center';
      context.fillText(tick.text, left + to(tick.at + 0.5), top + size + 14);
      context.textAlign = 'right';
      context.fillText(tick.text, left - 5, top + to(tick.at + 0.5) + 4);
    }
    context.textAlign = 'center';
    context.fillText('scored residue', left + size / 2, top + size + 30);
    context.save();
    context.translate(12, top + size / 2);
    context.rotate(-Math.PI / 2);
    context.fillText('aligned residue', 0, 0);
    context.restore();
    this.drawScale(context, width, top, size);
    context.strokeStyle = meta.style.faint;
    context.strokeRect(left, top, size, size);
    for (const [residue, colour] of [[state.pin, '#000000'], [state.hover, MARK]]) {
      if (residue === null) continue;
      context.strokeStyle = colour;
      context.setLineDash([4, 3]);
      line(context, left + to(residue + 0.5), top, left + to(residue + 0.5), top + size);
      line(context, left, top + to(residue + 0.5), left + size, top + to(residue + 0.5));
      context.setLineDash([]);
    }
  }

  drawScale(context, width, top, size) {
    const x = width - PAE_EDGE.right + 14;
    const scale = context.createLinearGradient(0, top + size, 0, top);
    const stops = meta.style.pae;
    stops.forEach((colour, number) => scale.addColorStop(number / (stops.length - 1), colour));
    context.fillStyle = scale;
    context.fillRect(x, top, 12, size);
    context.fillStyle = meta.style.ink;
    context.textAlign = 'left';
    const { max } = this.prediction.pae;
    for (let value = 0; value <= max; value += 10) {
      context.fillText(value, x + 16, top + size - (value / max) * size + (value ? 4 : 0));
    }
    context.fillText('Å', x + 16, top + 2);
  }
}

const STRIP_EDGE = { left: 52, top: 20, right: 12, bottom: 34 };

// Values along the chains; `paint(context, x, y, height)` draws them, `top` is the upper end of the axis.
class Strip {
  constructor(canvas, label, events) {
    this.canvas = canvas;
    this.label = label;
    listen(canvas, (x, y, clamp) => this.residuesAt(x, clamp), events);
  }

  show(prediction, scale) {
    this.prediction = prediction;
    this.scale = scale;
    this.canvas.hidden = !scale;
  }

  residuesAt(x, clamp) {
    if (!this.prediction) return null;
    const n = this.prediction.length;
    const residue = Math.floor(((x - STRIP_EDGE.left) / this.size) * n);
    if (!clamp && (residue < 0 || residue >= n)) return null;
    const found = Math.max(0, Math.min(n - 1, residue));
    return [found, found];
  }

  draw(state) {
    const { prediction, scale } = this;
    if (!prediction || !scale) return;
    const { context, width, height } = fit(this.canvas);
    const { left, top } = STRIP_EDGE;
    const tall = height - top - STRIP_EDGE.bottom;
    const n = prediction.length;
    const size = (this.size = width - left - STRIP_EDGE.right);
    const x = (residue) => left + (residue / n) * size;
    const y = (value) => top + tall * (1 - value / scale.top);
    scale.paint(context, x, y);
    if (state.block) {
      for (const [range, colour, at] of [[state.block.rows, ROWS, 0], [state.block.columns, COLUMNS, 5]]) {
        context.fillStyle = colour + '22';
        context.fillRect(x(range[0]), top, x(range[1] + 1) - x(range[0]), tall);
        context.fillStyle = colour;
        context.fillRect(x(range[0]), top + at, x(range[1] + 1) - x(range[0]), 4);
      }
    }
    context.strokeStyle = meta.style.faint;
    context.lineWidth = 1;
    context.strokeRect(left, top, size, tall);
    context.textAlign = 'center';
    prediction.chains.forEach((chain, number) => {
      context.strokeStyle = meta.style.ink;
      if (number) line(context, x(chain.start), top, x(chain.start), top + tall);
      if (prediction.chains.length > 1 && x(chain.length) - x(0) > 8) {
        bold(context, chain.name, x(chain.start + chain.length / 2), top - 6, chainColour(number));
      }
    });
    context.fillStyle = meta.style.ink;
    for (const tick of ticksOf(prediction)) context.fillText(tick.text, x(tick.at + 0.5), top + tall + 14);
    context.fillText('residue', left + size / 2, top + tall + 29);
    context.textAlign = 'right';
    for (const value of scale.ticks) context.fillText(value.toLocaleString('en'), left - 5, y(value) + 4);
    context.save();
    context.translate(12, top + tall / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = 'center';
    context.fillText(this.label, 0, 0);
    context.restore();
    for (const [residue, colour] of [[state.pin, '#000000'], [state.hover, MARK]]) {
      if (residue === null) continue;
      context.strokeStyle = colour;
      context.setLineDash([4, 3]);
      line(context, x(residue + 0.5), top, x(residue + 0.5), top + tall);
      context.setLineDash([]);
    }
  }
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function bold(context, text, x, y, colour) {
  context.save();
  context.font = 'bold ' + context.font;
  context.fillStyle = colour;
  context.fillText(text, x, y);
  context.restore();
}

function plddtScale(prediction) {
  const paint = (context, x, y) => {
    for (const band of meta.style.bands) {
      context.fillStyle = band.colour + '40';
      context.fillRect(x(0), y(band.high), x(prediction.length) - x(0), y(band.low) - y(band.high));
    }
    context.strokeStyle = meta.style.ink;
    context.beginPath();
    prediction.plddt.forEach((value, residue) => context.lineTo(x(residue + 0.5), y(value)));
    context.stroke();
  };
  return { top: 100, ticks: [0, 50, 70, 90, 100], paint };
}

function coverageScale(prediction) {
  const { coverage } = prediction;
  if (!coverage) return null;
  const depth = coverage.depth_by_identity;
  const total = depth[0].map((_, residue) => depth.reduce((sum, one) => sum + one[residue], 0));
  const most = total.reduce((a, b) => Math.max(a, b), 1);
  const paint = (context, x, y) => {
    const below = new Array(prediction.length).fill(0);
    for (let bin = depth.length - 1; bin >= 0; bin--) {
      context.fillStyle = meta.style.identity[Math.min(bin, meta.style.identity.length - 1)];
      depth[bin].forEach((rows, residue) => {
        if (!rows) return;
        const [from, to] = [y(below[residue]), y(below[residue] + rows)];
        context.fillRect(x(residue), to, x(residue + 1) - x(residue) + 0.5, from - to);
        below[residue] += rows;
      });
    }
  };
  const power = 10 ** Math.floor(Math.log10(most));
  const step = [0.2, 0.5, 1, 2].map((s) => s * power).find((s) => most / s <= 5);
  const ticks = [];
  for (let value = 0; value <= most; value += Math.max(1, step)) ticks.push(value);
  return { top: 1.05 * most, ticks, paint };
}
