// One selection in all pictures: the residue that is pointed at, the one that is kept, and a block.

const state = { prediction: null, hover: null, pin: null, block: null, colour: 'plddt' };
const HINT = 'Point at a residue, or drag in the aligned error or along the chains, to see it in the structure.';

const events = {
  hover: (found) => point(found, true),
  drag: (from, to, done) => {
    const range = (axis) => [Math.min(from[axis], to[axis]), Math.max(from[axis], to[axis])];
    const block = { rows: range(0), columns: range(1) };
    const single = block.rows[0] === block.rows[1] && block.columns[0] === block.columns[1];
    if (single && done) select(null);
    else if (!single) select(block);
  },
};
const pae = new PaeChart(byId('pae'), events);
const plddt = new Strip(byId('plddt'), 'pLDDT', events);
const coverage = new Strip(byId('coverage'), 'alignment rows', events);
const agreement = new Strip(byId('agreement'), 'lDDT-CA', events);
const view = new View(byId('view'), byId('view-note'), {
  hover: (residue) => point(residue === null ? null : [residue, residue], false),
  pick: (residue) => pin(residue),
});

// One frame draws what has changed since the last.
let isWaiting = false;
function redraw() {
  if (isWaiting) return;
  isWaiting = true;
  requestAnimationFrame(() => {
    isWaiting = false;
    for (const chart of [pae, plddt, coverage, agreement]) chart.draw(state);
    landscape.draw();
    designView.draw();
  });
}

function point(found, fromChart) {
  const residue = found === null ? null : found[1];
  const same = residue === state.hover;
  state.hover = residue;
  say(found);
  if (same) return;
  if (fromChart) view.mark(residue);
  markLetter(residue);
  redraw();
}

function pin(residue) {
  state.pin = residue;
  say();
  redraw();
}

function select(block) {
  state.block = block;
  if (block === null) state.pin = null;
  byId('clear').disabled = block === null;
  say();
  redraw();
  legend();
  view.paint(state.colour, block);
}

function say(found = null) {
  const { prediction } = state;
  if (!prediction) return;
  const parts = [];
  if (found && prediction.pae && found[0] !== found[1]) {
    parts.push(`aligned on ${residueName(prediction, found[0])}, scored ${residueName(prediction, found[1])}: ` +
      `${pae.error(found[0], found[1]).toFixed(0)} Å`);
  } else if (found || state.hover !== null || state.pin !== null) {
    const residue = found ? found[1] : state.hover !== null ? state.hover : state.pin;
    parts.push(`${residueName(prediction, residue)}: pLDDT ${prediction.plddt[residue].toFixed(1)}`);
  }
  if (state.block) {
    const { rows, columns: scored } = state.block;
    let text = `block: aligned on ${rangeName(prediction, rows)}, scored ${rangeName(prediction, scored)}`;
    if (prediction.pae) {
      let sum = 0;
      for (let i = rows[0]; i <= rows[1]; i++) for (let j = scored[0]; j <= scored[1]; j++) sum += pae.error(i, j);
      text += `, mean ${(sum / ((rows[1] - rows[0] + 1) * (scored[1] - scored[0] + 1))).toFixed(1)} Å`;
    }
    parts.push(text);
  }
  byId('readout').textContent = parts.join(' · ') || HINT;
}

function legend() {
  const entries = [];
  if (state.block) entries.push([ROWS, 'aligned on'], [COLUMNS, 'scored']);
  else if (state.colour === 'plddt') {
    for (const band of meta.style.bands) entries.push([band.color, `${band.name} (${band.low} to ${band.high})`]);
  } else state.prediction.chains.forEach((chain, number) => entries.push([chainColour(number), `chain ${chain.name}`]));
  byId('legend').replaceChildren(...legendOf(entries.slice(0, 40)));
}

// Arrow keys move a point in the aligned error, ten residues at a time with Shift; Enter marks the scored residue.
let cursor = [0, 0];
byId('pae').addEventListener('keydown', (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!state.prediction || (!step && event.key !== 'Enter')) return;
  event.preventDefault();
  if (!step) {
    pin(cursor[1]);
    return;
  }
  const most = state.prediction.length - 1;
  cursor = cursor.map((at, axis) => Math.max(0, Math.min(most, at + step[axis] * (event.shiftKey ? 10 : 1))));
  point(cursor, true);
});
byId('clear').addEventListener('click', () => select(null));
for (const radio of document.getElementsByName('colour')) {
  radio.addEventListener('change', () => {
    state.colour = radio.value;
    select(null);
  });
}
