// Single mutants as a heat map: residues by letters, coloured by a difference to the wild type.

const mutants = meta.rows.filter((row) => row.mutation !== undefined);
const LETTERS = [...'GPAVILMCFYWHKRQNEDST'];
const SCAN_SCORES = meta.scores.filter(({ name, covers }) => covers === 'mutant' && mutants.some((row) => typeof row[name] === 'number'));

// Letter of the wild type, name of the residue and letter of the mutant, of A24G or B:A24G; null for several mutations.
function singleOf(row) {
  const found = /^([^:]+:)?([A-Z])(\d+)([A-Z])$/.exec(row.mutation);
  return found && { place: `${found[1] || ''}${found[2]}${found[3]}`, chain: found[1] || '', number: Number(found[3]), old: found[2], letter: found[4] };
}

class MutationScan {
  constructor({ choose, chosen }) {
    const singles = mutants.map((row) => ({ row, ...singleOf(row) })).filter((one) => one.place);
    const order = (a, b) => a.chain.localeCompare(b.chain) || a.number - b.number;
    this.places = [...new Map([...singles].sort(order).map((one) => [one.place, one.old])).entries()];
    this.cells = new Map(singles.map(({ place, letter, row }) => [place + letter, row]));
    this.chosen = chosen;
    const rowAt = ([i, j]) => this.cells.get(this.places[j][0] + LETTERS[i]);
    this.rowAt = rowAt;
    const note = (at) => {
      const row = at && rowAt(at);
      byId('scan-note').textContent = !at ? 'Point, or use the arrow keys; Enter opens a mutant. A dot marks the wild type. A difference is no measured stability.'
        : !row ? `${this.places[at[1]][0]}${LETTERS[at[0]]}: ${this.places[at[1]][1] === LETTERS[at[0]] ? 'wild type' : 'not folded'}`
          : [row.mutation, ...SCAN_SCORES.map(({ name, label }) => `${label} ${scoreText(name, row[name])}`)].join(' · ');
    };
    this.map = new CellMap(byId('scan-cells'), {
      hover: note,
      choose: (at) => {
        const row = rowAt(at);
        if (row) choose(row);
      },
    });
    if (this.places.length === 0) return;
    byId('scan').hidden = false;
    byId('scan-score').replaceChildren(...SCAN_SCORES.map(({ name, label }) => make('option', label, { value: name })));
    byId('scan-score').addEventListener('change', () => this.draw());
    note(null);
  }

  draw() {
    if (this.places.length === 0) return;
    const score = byId('scan-score').value;
    const values = [...this.cells.values()].map((row) => row[score]).filter((value) => typeof value === 'number').map(Math.abs).sort((a, b) => a - b);
    const limit = values[Math.floor(0.98 * (values.length - 1))] || 1;
    const isStrain = score.startsWith('strain');
    const [middle, loss, gain] = [token('blank'), token('loss'), token('gain')];
    const isWorse = (value) => (score.startsWith('dplddt') ? value < 0 : value > 0);
    const text = scoreText(score, limit).replace('+', '');
    const ends = score.startsWith('dplddt') ? ['loss', 'gain'] : ['gain', 'loss'];
    ramp('scan-scale', isStrain ? '0' : `−${text}`, text, [...(isStrain ? [] : [`var(--${ends[0]})`]), 'var(--blank)', `var(--${ends[1]})`]);
    this.map.show({
      rows: LETTERS,
      columns: this.places.map(([place]) => place),
      colour: (i, j) => {
        const row = this.rowAt([i, j]);
        if (!row || typeof row[score] !== 'number') return null;
        return mix(middle, isWorse(row[score]) ? loss : gain, Math.min(1, Math.abs(row[score]) / limit));
      },
      isChosen: (i, j) => this.rowAt([i, j]) !== undefined && this.rowAt([i, j]) === this.chosen(),
      hasDot: (i, j) => this.places[j][1] === LETTERS[i],
    });
  }
}
