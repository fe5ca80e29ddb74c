// Cells of two lists of names, to point at and to choose: partners of a screen, and mutants.

class CellMap {
  constructor(canvas, events) {
    Object.assign(this, { canvas, events, at: null, spec: null });
    const cell = (event) => {
      const box = canvas.getBoundingClientRect();
      return this.cellAt(event.clientX - box.left, event.clientY - box.top);
    };
    canvas.addEventListener('pointermove', (event) => this.move(cell(event)));
    canvas.addEventListener('pointerleave', () => this.move(null));
    canvas.addEventListener('click', (event) => {
      const found = cell(event);
      if (found) events.choose(found);
    });
    canvas.addEventListener('keydown', (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!this.spec || (!step && event.key !== 'Enter')) return;
      event.preventDefault();
      const ends = [this.spec.rows.length - 1, this.spec.columns.length - 1];
      if (step) this.move(this.at ? this.at.map((at, axis) => Math.max(0, Math.min(ends[axis], at + step[axis]))) : [0, 0]);
      else if (this.at) events.choose(this.at);
    });
  }

  // `colour(i, j)` of a cell or null, `isChosen(i, j)` and `hasDot(i, j)`; `rows` and `columns` are names.
  show(spec) {
    this.spec = spec;
    this.at = null;
    this.draw();
  }

  move(at) {
    if (String(at) === String(this.at)) return;
    this.at = at;
    this.events.hover(at);
    this.draw();
  }

  draw() {
    if (!this.spec) return;
    const { canvas, spec: { rows, columns, colour, isChosen, hasDot } } = this;
    const widest = (names) => Math.min(150, 6.6 * names.reduce((n, name) => Math.max(n, name.length), 0) + 10);
    const room = (canvas.parentElement.clientWidth || 800) - 32;
    const clamp = (value, low, high) => Math.max(low, Math.min(high, Math.floor(value)));
    this.wide = clamp((room - widest(rows)) / columns.length, columns.length > 200 ? 2 : 9, 56);
    this.tall = clamp(this.wide, rows.length > 40 ? Math.min(this.wide, 9) : 16, 22);
    this.left = this.tall >= 9 ? widest(rows) : 4;
    this.top = this.wide >= 9 ? widest(columns) : 4;
    const size = [this.left + columns.length * this.wide + 4, this.top + rows.length * this.tall + 4];
    [canvas.style.width, canvas.style.height] = size.map((pixels) => `${pixels}px`);
    canvas.dataset.cell = `${this.wide} ${this.tall}`;
    const { context } = fit(canvas, size);
    context.fillStyle = token('raised');
    context.fillRect(this.left, this.top, columns.length * this.wide, rows.length * this.tall);
    const gap = this.wide > 4 ? 1 : 0;
    const ring = (i, j, name) => {
      context.strokeStyle = token(name);
      context.lineWidth = 2;
      context.strokeRect(this.left + j * this.wide, this.top + i * this.tall, this.wide - gap, this.tall - gap);
    };
    const chosen = [];
    rows.forEach((_, i) => columns.forEach((__, j) => {
      const fill = colour(i, j);
      if (isChosen(i, j)) chosen.push([i, j]);
      if (fill) {
        context.fillStyle = fill;
        context.fillRect(this.left + j * this.wide, this.top + i * this.tall, this.wide - gap, this.tall - gap);
      }
      if (hasDot && hasDot(i, j)) {
        context.fillStyle = token('soft');
        context.fillRect(this.left + (j + 0.5) * this.wide - 2, this.top + (i + 0.5) * this.tall - 2, 4, 4);
      }
    }));
    for (const [i, j] of chosen) ring(i, j, 'ink');
    if (this.at) ring(...this.at, 'accent');
    context.fillStyle = token('soft');
    context.textAlign = 'right';
    if (this.left > 4) rows.forEach((name, i) => context.fillText(name, this.left - 5, this.top + (i + 0.5) * this.tall + 4, this.left - 7));
    if (this.top > 4) {
      columns.forEach((name, j) => {
        context.save();
        context.translate(this.left + (j + 0.5) * this.wide + 4, this.top - 5);
        context.rotate(-Math.PI / 2);
        context.textAlign = 'left';
        context.fillText(name, 0, 0, this.top - 7);
        context.restore();
      });
    }
  }

  cellAt(x, y) {
    if (!this.spec) return null;
    const cell = [Math.floor((y - this.top) / this.tall), Math.floor((x - this.left) / this.wide)];
    return cell[0] >= 0 && cell[1] >= 0 && cell[0] < this.spec.rows.length && cell[1] < this.spec.columns.length ? cell : null;
  }
}

const inPairs = meta.rows.filter((row) => row.partner_1 !== undefined);
const pairScores = meta.scores.filter(({ name, covers, better, shown: place, digits }) => covers === 'pair' && better === 'higher' && place !== 'details' && digits > 0 &&
  inPairs.some((row) => row[name] !== undefined)).map(({ name, label }) => [name, label]);
// A screen has several pairs, some of which share a partner.
const pairsOfPartners = [...new Set(inPairs.map((row) => `${row.partner_1}\n${row.partner_2}`))];
const isScreen = pairScores.length > 0 && pairsOfPartners.length > 2 &&
  new Set(pairsOfPartners.flatMap((pair) => pair.split('\n'))).size < 2 * pairsOfPartners.length;
const byName = (a, b) => String(a).localeCompare(String(b), 'en', { numeric: true });

// Baits by preys: the best row of each pair of partners.
class PartnerMatrix {
  constructor(canvas, { choose, note }) {
    const nameOf = ([i, j]) => `${this.baits[i]} with ${this.preys[j]}`;
    this.rowAt = ([i, j]) => this.cells.get(i * this.preys.length + j);
    this.map = new CellMap(canvas, {
      hover: (at) => {
        const row = at && this.rowAt(at);
        note(at ? `${nameOf(at)}: ${row ? scoreText(this.score, row[this.score]) : 'not folded'}` : '');
      },
      choose: (at) => {
        const row = this.rowAt(at);
        if (row) choose(row);
      },
    });
  }

  // A list against itself gets both halves.
  show(rows, score, chosen) {
    this.score = score;
    const names = (key) => [...new Set(rows.map((row) => row[key]))].sort(byName);
    let [baits, preys] = [names('partner_1'), names('partner_2')];
    const isSquare = baits.some((name) => preys.includes(name));
    if (isSquare) baits = preys = [...new Set([...baits, ...preys])].sort(byName);
    const place = (list) => new Map(list.map((name, number) => [name, number]));
    const [rowOf, columnOf] = [place(baits), place(preys)];
    Object.assign(this, { baits, preys, cells: new Map() });
    for (const row of rows) {
      const keys = [[row.partner_1, row.partner_2], ...(isSquare ? [[row.partner_2, row.partner_1]] : [])];
      for (const [bait, prey] of keys) {
        const key = rowOf.get(bait) * preys.length + columnOf.get(prey);
        const known = this.cells.get(key);
        if (!known || (row[score] ?? -1) > (known[score] ?? -1)) this.cells.set(key, row);
      }
    }
    const largest = SCORES.get(score).scale ? SCORES.get(score).scale.largest : 1;
    const [from, to] = [token('ramp-from'), token('ramp-to')];
    ramp('matrix-scale', '0', String(largest), ['var(--ramp-from)', 'var(--ramp-to)']);
    this.map.show({
      rows: baits,
      columns: preys,
      colour: (i, j) => {
        const row = this.rowAt([i, j]);
        return row && typeof row[score] === 'number' ? mix(from, to, Math.max(0, Math.min(1, row[score] / largest))) : null;
      },
      isChosen: (i, j) => {
        const row = this.rowAt([i, j]);
        return Boolean(row && chosen() && row.target === chosen().target);
      },
    });
  }
}
