// Design of the chosen prediction: curves of loss and pLDDT, and a film of its CA atoms that can be turned.

const CURVE_MARGIN = 44;

class Design {
  constructor({ curve, film, viewer, slider, play }) {
    Object.assign(this, { curve, film, viewer, slider, play, design: null, points: null, frame: 0, angles: [0.4, 0.3], timer: null });
    slider.addEventListener('input', () => this.go(Number(slider.value)));
    play.addEventListener('click', () => this.toggle());
    film.addEventListener('pointerdown', (event) => film.setPointerCapture(event.pointerId));
    film.addEventListener('pointermove', (event) => {
      if (!event.buttons) return;
      this.angles = [this.angles[0] + event.movementX / 90, this.angles[1] + event.movementY / 90];
      this.draw();
    });
  }

  // Show the design of a row; false if it has none. A later call overtakes an earlier one.
  async show(row) {
    const found = (meta.designs || []).find((one) => one.rows.some((number) => meta.rows[number] === row)) || null;
    this.stop();
    if (found === this.design) return Boolean(found);
    Object.assign(this, { design: found, points: null, frame: 0 });
    if (found && found.film) {
      const bytes = await unpack(found.film.blob);
      if (this.design !== found) return true;
      this.points = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
      this.slider.max = String(found.film.frames - 1);
      if (meta.viewer) {
        if (!this.frames) this.frames = new FilmView(this.viewer);
        this.arrange();
        this.frames.show(found.film, this.points).catch((error) => this.withoutViewer(error));
      }
      this.go(found.film.frames - 1);
    }
    return Boolean(found);
  }

  // Draw the film without the viewer, which failed.
  withoutViewer(error) {
    console.warn(`The film is drawn without the viewer: ${error.message || error}`);
    this.frames = null;
    this.arrange();
    this.draw();
  }

  arrange() {
    const hasFilm = Boolean(this.design && this.design.film);
    this.film.hidden = !hasFilm || Boolean(this.frames);
    this.viewer.hidden = !hasFilm || !this.frames;
  }

  go(frame) {
    this.frame = frame;
    this.slider.value = String(frame);
    if (this.frames) this.frames.go(frame);
    this.draw();
  }

  toggle() {
    if (this.timer) {
      this.stop();
      return;
    }
    const last = this.design.film.frames - 1;
    if (this.frame === last) this.go(0);
    this.play.textContent = 'stop';
    this.timer = setInterval(() => (this.frame === last ? this.stop() : this.go(this.frame + 1)), 80);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = 'play';
  }

  draw() {
    if (!this.design) return;
    this.drawCurve();
    if (this.points && !this.frames) this.drawFilm();
  }

  drawCurve() {
    const { context, width: wide, height: tall } = fit(this.curve);
    context.textAlign = 'left';
    const { loss, plddt, stages, film } = this.design;
    const [low, high] = [Math.min(...loss), Math.max(...loss)];
    const x = (step) => CURVE_MARGIN + (step / Math.max(1, loss.length - 1)) * (wide - 2 * CURVE_MARGIN);
    const y = (share) => tall - 28 - share * (tall - 48);
    context.fillStyle = token('ink');
    for (const [name, first] of stages) {
      context.strokeStyle = token('line');
      context.strokeRect(x(first), y(1), 0, y(0) - y(1));
      context.fillText(name, x(first) + 3, 14);
    }
    const curve = (values, from, to, colour) => {
      context.beginPath();
      values.forEach((value, step) => context.lineTo(x(step), y((value - from) / Math.max(to - from, 1e-9))));
      context.strokeStyle = colour;
      context.stroke();
    };
    curve(loss, low, high, token('ink'));
    curve(plddt, 0, 100, token('accent'));
    context.fillStyle = token('ink');
    context.fillText(high.toPrecision(3), 2, y(1) + 10);
    context.fillText(low.toPrecision(3), 2, y(0));
    context.fillText('loss', 2, tall - 6);
    context.fillStyle = token('accent');
    context.fillText('100', wide - CURVE_MARGIN + 4, y(1) + 10);
    context.fillText('0', wide - CURVE_MARGIN + 4, y(0));
    context.fillText('pLDDT', wide - CURVE_MARGIN, tall - 6);
    context.fillStyle = token('ink');
    context.fillText(`${loss.length} steps`, wide / 2 - 20, tall - 6);
    if (film) context.fillRect(x(film.steps[this.frame]) - 0.5, y(1), 1, y(0) - y(1));
  }

  drawFilm() {
    const { context, width: wide, height: tall } = fit(this.film);
    const { chains, step } = this.design.film;
    const count = chains.reduce((sum, length) => sum + length, 0);
    const [[sin, cos], [sin2, cos2]] = this.angles.map((angle) => [Math.sin(angle), Math.cos(angle)]);
    const at = (frame, i) => [0, 1, 2].map((axis) => this.points.getInt16(6 * (frame * count + i) + 2 * axis, true) * step);
    const last = this.design.film.frames - 1;
    let radius = 5;
    for (let i = 0; i < count; i++) radius = Math.max(radius, Math.hypot(...at(last, i)));
    const scale = (0.46 * Math.min(wide, tall)) / radius;
    const turned = (i) => {
      const [a, b, c] = at(this.frame, i);
      const [u, w] = [cos * a + sin * c, cos * c - sin * a];
      return [wide / 2 + scale * u, tall / 2 + scale * (cos2 * b - sin2 * w), cos2 * w + sin2 * b];
    };
    const lines = [];
    let start = 0;
    chains.forEach((length, number) => {
      for (let i = start; i < start + length - 1; i++) lines.push([turned(i), turned(i + 1), number]);
      start += length;
    });
    lines.sort((one, other) => one[0][2] + one[1][2] - other[0][2] - other[1][2]);
    context.lineCap = 'round';
    for (const [from, to, number] of lines) {
      const near = (from[2] + to[2]) / (4 * radius) + 0.5;
      context.beginPath();
      context.moveTo(from[0], from[1]);
      context.lineTo(to[0], to[1]);
      context.globalAlpha = 0.35 + 0.65 * Math.min(1, Math.max(0, near));
      context.lineWidth = 2 + 3 * Math.min(1, Math.max(0, near));
      context.strokeStyle = chainColour(number);
      context.stroke();
    }
    context.globalAlpha = 1;
    context.fillStyle = token('ink');
    context.fillText(`step ${this.design.film.steps[this.frame] + 1}`, 8, tall - 8);
  }
}

const designView = new Design({ curve: byId('design-curve'), film: byId('design-film'), viewer: byId('design-view'), slider: byId('design-frame'), play: byId('design-play') });
const OF_DESIGNS = meta.scores.filter(({ covers, shown: place }) => covers === 'design' && place === 'details');

async function drawDesign({ row }) {
  const hasDesign = await designView.show(row);
  byId('design').hidden = !hasDesign;
  if (!hasDesign) return;
  const { film, verdicts, stages, loss } = designView.design;
  const verdict = verdicts[row.target] || {};
  const facts = [`${row.name}: ${counted(loss.length, 'step')}, ${stages.map(([name]) => name).join(', ')}`];
  if (verdict.filters) facts.push(verdict.filters === 'passed' ? 'passed all filters' : `failed filters: ${verdict.filters}`);
  if (verdict.chains) facts.push(`residues ${verdict.chains}`);
  if (verdict.hotspots) facts.push(`hotspots ${verdict.hotspots}`);
  if (verdict.kept) facts.push(`kept ${verdict.kept}`);
  for (const { name, label, digits } of OF_DESIGNS) if (typeof row[name] === 'number') facts.push(`${label}: ${shown(row[name], digits)}`);
  if (verdict.note) facts.push(verdict.note);
  if (!film) facts.push('no film of this design on the page');
  byId('design-note').textContent = facts.join(' · ');
  byId('design-controls').hidden = !film;
  designView.arrange();
  designView.draw();
}
