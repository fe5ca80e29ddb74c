// Baits by preys: the best score of each pair of partners, to point at and to choose.

const SCORES_OF_PAIRS = meta.scores.filter(({ covers, better, shown }) => covers === 'pair' && better === 'higher' && shown !== 'details')
  .map(({ name, label }) => [name, label]);
const FROM = [247, 251, 255];
const TO = [8, 48, 107];

class Matrix {
  constructor(canvas, events) {
    this.canvas = canvas;
    this.events = events;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return this.cellAt(event.clientX - box.left, event.clientY - box.top);
    };
    canvas.addEventListener('pointermove', (event) => events.hover(at(event)));
    canvas.addEventListener('pointerleave', () => events.hover(null));
    canvas.addEventListener('click', (event) => {
      const found = at(event);
      if (found && found.row) events.choose(found.row);
    });
  }

  // Cells of the best rows of all pairs; a list against itself gets both halves.
  show(rows, score) {
    this.score = score;
    const names = (key) => [...new Set(rows.map((row) => row[key]))].sort((a, b) => a.localeCompare(b, 'en', { numeric: true }));
    let [baits, preys] = [names('partner_1'), names('partner_2')];
    const isSquare = baits.some((name) => preys.includes(name));
    if (isSquare) baits = preys = [...new Set([...baits, ...preys])].sort((a, b) => a.localeCompare(b, 'en', { numeric: true }));
    const place = (list) => new Map(list.map((name, number) => [name, number]));
    const [rowOf, columnOf] = [place(baits), place(preys)];
    this.baits = baits;
    this.preys = preys;
    this.cells = new Map();
    for (const row of rows) {
      const keys = [[row.partner_1, row.partner_2], ...(isSquare ? [[row.partner_2, row.partner_1]] : [])];
      for (const [bait, prey] of keys) {
        const key = rowOf.get(bait) * preys.length + columnOf.get(prey);
        const known = this.cells.get(key);
        if (!known || (row[score] ?? -1) > (known[score] ?? -1)) this.cells.set(key, row);
      }
    }
    this.draw();
  }

  draw() {
    const { baits, preys, canvas } = this;
    const most = Math.max(baits.length, preys.length);
    this.size = Math.max(2, Math.min(22, Math.floor(1000 / most)));
    const named = this.size >= 9;
    const widest = (names) => Math.min(160, 7 * names.reduce((n, name) => Math.max(n, name.length), 0) + 8);
    this.left = named ? widest(baits) : 4;
    this.top = named ? widest(preys) : 4;
    const [wide, tall] = [this.left + preys.length * this.size + 4, this.top + baits.length * this.size + 4];
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${tall}px`;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(tall * ratio);
    const context = canvas.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = '#eceff1';
    context.fillRect(this.left, this.top, preys.length * this.size, baits.length * this.size);
    const gap = this.size > 4 ? 1 : 0;
    for (const [key, row] of this.cells) {
      const [i, j] = [Math.floor(key / preys.length), key % preys.length];
      const value = row[this.score];
      if (value === undefined || value === null) continue;
      const share = Math.max(0, Math.min(1, value));
      context.fillStyle = `rgb(${FROM.map((from, k) => Math.round(from + share * (TO[k] - from))).join(' ')})`;
      context.fillRect(this.left + j * this.size, this.top + i * this.size, this.size - gap, this.size - gap);
    }
    if (!named) return;
    context.fillStyle = meta.style.ink;
    context.font = '11px sans-serif';
    context.textAlign = 'right';
    baits.forEach((name, i) => context.fillText(name, this.left - 4, this.top + (i + 0.5) * this.size + 4, this.left - 6));
    preys.forEach((name, j) => {
      context.save();
      context.translate(this.left + (j + 0.5) * this.size + 4, this.top - 4);
      context.rotate(-Math.PI / 2);
      context.textAlign = 'left';
      context.fillText(name, 0, 0, this.top - 6);
      context.restore();
    });
  }

  cellAt(x, y) {
    if (!this.baits) return null;
    const [i, j] = [Math.floor((y - this.top) / this.size), Math.floor((x - this.left) / this.size)];
    if (i < 0 || j < 0 || i >= this.baits.length || j >= this.preys.length) return null;
    return { bait: this.baits[i], prey: this.preys[j], row: this.cells.get(i * this.preys.length + j) };
  }
}
