// Values along the chains: pLDDT, and alignment rows.

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
    context.strokeStyle = token('edge');
    context.lineWidth = 1;
    context.strokeRect(left, top, size, tall);
    for (const chain of prediction.chains.slice(1)) line(context, x(chain.start), top, x(chain.start), top + tall);
    nameChains(context, prediction, x, top);
    context.textAlign = 'center';
    context.fillStyle = token('soft');
    for (const tick of ticksOf(prediction)) context.fillText(tick.text, x(tick.at + 0.5), top + tall + 14);
    context.fillText('residue', left + size / 2, top + tall + 29);
    context.textAlign = 'right';
    for (const value of scale.ticks) context.fillText(value.toLocaleString('en'), left - 5, y(value) + 4);
    upright(context, this.label, 12, top + tall / 2);
    for (const [residue, colour] of [[state.pin, token('ink')], [state.hover, MARK]]) {
      if (residue === null) continue;
      context.strokeStyle = colour;
      context.setLineDash([4, 3]);
      line(context, x(residue + 0.5), top, x(residue + 0.5), top + tall);
      context.setLineDash([]);
    }
  }
}

function plddtScale(prediction) {
  const paint = (context, x, y) => {
    for (const band of meta.style.bands) {
      context.fillStyle = band.color + '40';
      context.fillRect(x(0), y(band.high), x(prediction.length) - x(0), y(band.low) - y(band.high));
    }
    context.strokeStyle = token('ink');
    context.beginPath();
    prediction.plddt.forEach((value, residue) => context.lineTo(x(residue + 0.5), y(value)));
    context.stroke();
  };
  return { top: 100, ticks: [0, 50, 70, 90, 100], paint };
}

// lDDT of the residues that the reference has; gaps elsewhere.
function agreementScale({ reference }) {
  if (!reference || !reference.lddt) return null;
  const paint = (context, x, y) => {
    reference.lddt.forEach((value, residue) => {
      if (value === null) return;
      context.fillStyle = bandOf(100 * value).color;
      context.fillRect(x(residue), y(value), x(residue + 1) - x(residue), y(0) - y(value));
    });
  };
  return { top: 1, ticks: [0, 0.5, 0.7, 0.9, 1], paint };
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
