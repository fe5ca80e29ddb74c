// The table, the chosen prediction, and what ties its pictures together.

const byId = (id) => document.getElementById(id);
const state = { prediction: null, hover: null, pin: null, block: null, colour: 'plddt' };

const COLUMNS_OF_TABLE = [
  ['name', 'target', 0], ['model', 'model', 0], ['seed', 'seed', 0], ['sample', 'sample', 0], ['rank', 'rank', 0],
  ['partner_1', 'partner 1', 0], ['partner_2', 'partner 2', 0], ['length', 'residues', 0],
  ...meta.scores.filter(({ shown }) => shown === 'list').map(({ name, label, digits }) => [name, label, digits]),
  ['seconds', 'seconds', 1], ['peak_memory', 'memory (MiB)', 0],
];
if (window.matchMedia('(prefers-color-scheme: dark)').matches) Object.assign(meta.style, { ink: '#dfe6ec', faint: '#7d8994' });
const TEXT = new Set(['name', 'sample', 'partner_1', 'partner_2', 'model']);
const PAGE_ROWS = 100;
const sorting = { key: null, down: false };

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function shown(value, digits) {
  if (value === undefined || value === null) return '–';
  return typeof value === 'number' && digits ? value.toFixed(digits) : typeof value === 'number' && !Number.isInteger(value)
    ? value.toFixed(0) : String(value);
}

const columns = COLUMNS_OF_TABLE.filter(([key]) => meta.rows.some((row) => row[key] !== undefined && row[key] !== null));

function drawHead() {
  const row = make('tr');
  for (const [key, label] of columns) {
    const cell = make('th', undefined, { scope: 'col', class: TEXT.has(key) ? 'text' : '' });
    if (sorting.key === key) cell.setAttribute('aria-sort', sorting.down ? 'descending' : 'ascending');
    const title = EXPLANATIONS.has(key) ? { title: EXPLANATIONS.get(key) } : {};
    const button = make('button', label + (sorting.key === key ? (sorting.down ? ' ▾' : ' ▴') : ''), { type: 'button', ...title });
    button.addEventListener('click', () => {
      sorting.down = sorting.key === key ? !sorting.down : !TEXT.has(key) && key !== 'rank' && key !== 'seed';
      sorting.key = key;
      drawHead();
      drawRows();
    });
    cell.append(button);
    row.append(cell);
  }
  document.querySelector('#list thead').replaceChildren(row);
}

function rowElement(data) {
  const row = make('tr', undefined, { tabindex: '0', 'aria-selected': String(Boolean(state.prediction && state.prediction.row === data)) });
  for (const [key, , digits] of columns) {
    const text = shown(data[key], digits);
    row.append(make('td', text, TEXT.has(key) ? { class: 'text', title: text } : {}));
  }
  row.addEventListener('click', () => choose(data));
  row.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' || event.key === ' ') {
      event.preventDefault();
      choose(data);
    }
  });
  return row;
}

// Conditions such as "ipsae>0.5 rank=1", all of which a row has to meet; null where the text is none.
function conditions() {
  const text = byId('where').value.trim();
  const tests = { '>': (a, b) => a > b, '>=': (a, b) => a >= b, '<': (a, b) => a < b, '<=': (a, b) => a <= b, '=': (a, b) => a === b };
  const found = [];
  const left = text.replace(/([a-z_0-9]+)\s*(>=|<=|==?|>|<)\s*(-?\d+(?:\.\d+)?)/gi, (all, key, sign, number) => {
    found.push([key.toLowerCase(), tests[sign === '==' ? '=' : sign], Number(number)]);
    return '';
  }).replace(/\b(and)\b|[\s,;&]/gi, '');
  const unknown = found.map(([key]) => key).find((key) => !meta.rows.some((row) => typeof row[key] === 'number'));
  const wrong = left ? 'expected ipsae>0.5, for example' : unknown ? `no score ${unknown}` : '';
  byId('where').setAttribute('aria-invalid', String(Boolean(wrong)));
  byId('where-note').textContent = wrong;
  return wrong ? null : found;
}

let page = 0;
let kept = [];
function drawRows() {
  page = 0;
  const words = byId('find').value.toLowerCase().split(/\s+/).filter(Boolean);
  const best = byId('best').checked;
  const limits = conditions() || [];
  kept = meta.rows.filter((data) => {
    const text = `${data.target} ${data.name} ${data.model} ${data.partner_1 || ''} ${data.partner_2 || ''}`.toLowerCase();
    return (!best || (data.rank || 1) === 1) && words.every((word) => text.includes(word)) &&
      limits.every(([key, test, number]) => typeof data[key] === 'number' && test(data[key], number));
  });
  if (sorting.key) {
    const sign = sorting.down ? -1 : 1;
    const value = (data) => data[sorting.key];
    kept.sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      const missing = (x) => x === undefined || x === null;
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      return sign * (typeof a === 'number' ? a - b : String(a).localeCompare(String(b), 'en', { numeric: true }));
    });
  }
  drawPage();
  drawMatrix();
  const targets = new Set(kept.map((data) => data.target)).size;
  byId('count').textContent = `${targets} target${targets === 1 ? '' : 's'}, ${kept.length} prediction${kept.length === 1 ? '' : 's'}`;
}

function drawPage() {
  const from = page * PAGE_ROWS;
  const shownRows = kept.slice(from, from + PAGE_ROWS);
  document.querySelector('#list tbody').replaceChildren(...shownRows.map(rowElement));
  byId('list').scrollTop = 0;
  byId('pages').hidden = kept.length <= PAGE_ROWS;
  byId('page').textContent = `${from + 1} to ${from + shownRows.length} of ${kept.length.toLocaleString('en')}`;
  byId('previous').disabled = page === 0;
  byId('next').disabled = from + PAGE_ROWS >= kept.length;
}

function turn(step) {
  page += step;
  drawPage();
}

const inPairs = meta.rows.filter((row) => row.partner_1 !== undefined);
const pairScores = SCORES_OF_PAIRS.filter(([key]) => inPairs.some((row) => row[key] !== undefined));
const hasMatrix = pairScores.length > 0 && new Set(inPairs.map((row) => `${row.partner_1}\n${row.partner_2}`)).size > 2;
const matrix = new Matrix(byId('cells'), {
  choose: (row) => choose(row),
  hover: (found) => {
    const value = found && found.row && found.row[byId('score').value];
    byId('cell').textContent = found ? `${found.bait} with ${found.prey}: ${shown(value, 2)}` : '';
  },
});

function drawMatrix() {
  if (hasMatrix && byId('matrix').open) matrix.show(kept.filter((row) => row.partner_1 !== undefined), byId('score').value);
}

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
const view = new View(byId('view'), byId('view-note'), {
  hover: (residue) => point(residue === null ? null : [residue, residue], false),
  pick: (residue) => {
    state.pin = residue;
    say();
    redraw();
  },
});

// One frame draws what has changed since the last.
let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const chart of [pae, plddt, coverage]) chart.draw(state);
    landscape.draw();
    designView.draw();
  });
}

const landscape = new Landscape(byId('landscape'), {
  choose: (row) => choose(row),
  hover: (member) => {
    byId('ensemble-note').textContent = member ? sampleName(member) : landscape.note;
  },
});

function sampleName({ row, cluster }) {
  const sample = row.sample ? `, ${row.sample}` : '';
  return `${row.model}, seed ${row.seed}${sample}: cluster ${cluster}, mean pLDDT ${shown(row.mean_plddt, 1)}`;
}

function drawEnsemble(prediction) {
  landscape.show(prediction.row);
  byId('ensemble').hidden = !landscape.ensemble;
  byId('ensemble-note').textContent = landscape.note;
  byId('single').hidden = true;
  if (!landscape.ensemble) return;
  byId('overlay').hidden = !meta.viewer || landscape.ensemble.overlay.length === 0;
  const links = landscape.ensemble.files.map((name) => make('a', name, { href: encodeURIComponent(name), download: name }));
  byId('ensemble-files').replaceChildren(...links);
}

async function overlay() {
  const order = chosen;
  const items = await Promise.all(landscape.ensemble.overlay.map(async (one) => ({
    prediction: { ...await loadPrediction(meta.rows[one.row]), structure: atomsOf(one.structure, await unpack(one.structure.blob)) },
    colour: chainColour(one.cluster - 1), name: `cluster ${one.cluster}`,
  })));
  if (order !== chosen) return;
  byId('single').hidden = false;
  showTogether(items);
}

// All models of the target, superposed on the first.
async function models() {
  const order = chosen;
  if (!byId('together').checked) {
    legend();
    view.show(state.prediction);
    return;
  }
  const rows = modelsOf(state.prediction.row);
  const predictions = await Promise.all(rows.map(loadPrediction));
  if (order !== chosen || !byId('together').checked) return;
  showTogether(predictions.map((one, number) => {
    const { prediction, rmsd } = number ? moved(one, predictions[0]) : { prediction: one, rmsd: null };
    const { rank, model, seed } = one.row;
    const name = `${rank ? `rank ${rank}` : `${model}, seed ${seed}`}${rmsd === null ? '' : ` (${rmsd.toFixed(1)} Å)`}`;
    return { prediction, colour: chainColour(number), name };
  }));
}

function offerModels(row) {
  const number = modelsOf(row).length;
  byId('together').checked = false;
  byId('models').hidden = !meta.viewer || number < 2;
  byId('models').lastChild.textContent = ` ${number} models together`;
}

function showTogether(items) {
  byId('legend').replaceChildren(...items.map(({ colour, name }) => {
    const entry = make('span', name);
    const patch = make('i');
    patch.style.background = colour;
    entry.prepend(patch);
    return entry;
  }));
  view.showTogether(items);
}

function point(found, fromChart) {
  const residue = found === null ? null : found[1];
  const same = residue === state.hover;
  state.hover = residue;
  say(found);
  if (same) return;
  if (fromChart) view.mark(residue);
  redraw();
}

function select(block) {
  state.block = block;
  if (block === null) state.pin = null;
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
  byId('readout').textContent = parts.join(' · ') || 'Drag in the aligned error or along the chains to see residues in the structure.';
}

function legend() {
  const entries = [];
  if (state.block) entries.push([ROWS, 'aligned on'], [COLUMNS, 'scored']);
  else if (state.colour === 'plddt') {
    for (const band of meta.style.bands) entries.push([band.colour, `${band.name} (${band.low} to ${band.high})`]);
  } else state.prediction.chains.forEach((chain, number) => entries.push([chainColour(number), `chain ${chain.name}`]));
  byId('legend').replaceChildren(...entries.slice(0, 40).map(([colour, text]) => {
    const entry = make('span', text);
    const patch = make('i');
    patch.style.background = colour;
    entry.prepend(patch);
    return entry;
  }));
}

let chosen = 0;
async function choose(row) {
  const order = ++chosen;
  const prediction = await loadPrediction(row);
  if (order !== chosen) return;
  Object.assign(state, { prediction, hover: null, pin: null, block: null });
  const rowsOfPage = document.querySelectorAll('#list tbody tr');
  rowsOfPage.forEach((one, number) => one.setAttribute('aria-selected', String(kept[page * PAGE_ROWS + number] === row)));
  document.querySelector('main').hidden = false;
  byId('name').textContent = prediction.name;
  const chains = prediction.chains.map((chain) => `${chain.name} (${chain.length})`).join(', ');
  const facts = [`${row.model}, seed ${row.seed}`, `chains ${chains}`, `mean pLDDT ${shown(row.mean_plddt, 1)}`];
  for (const [key, label] of [['ptm', 'pTM'], ['iptm', 'ipTM']]) if (row[key] !== undefined) facts.push(`${label} ${row[key].toFixed(2)}`);
  if (prediction.relaxed) facts.push('relaxed structure');
  if (prediction.not_relaxed) facts.push(`not relaxed: ${prediction.not_relaxed}`);
  byId('summary').textContent = facts.join(' · ');
  view.block = null;
  pae.show(prediction);
  plddt.show(prediction, plddtScale(prediction));
  coverage.show(prediction, coverageScale(prediction));
  byId('pae-note').textContent = prediction.pae
    ? (prediction.pae.stride > 1 ? `Means over squares of ${prediction.pae.stride} residues.` : '')
    : row.omitted ? 'The page has no room for the aligned error of this prediction; its file has it.' : 'There is no aligned error of this prediction.';
  byId('coverage-note').textContent = prediction.coverage
    ? `Alignment rows by identity to the query, darker is more alike; ${prediction.coverage.rows.map((rows, number) => `${prediction.chains[number].name}: ${Number(rows).toLocaleString('en')}`).join(', ')} rows.`
    : 'The folder says nothing of the alignments of this target.';
  drawSequence(prediction, {
    hover: (residue) => point(residue === null ? null : [residue, residue], true),
    pick: (residue) => {
      state.pin = residue;
      say();
      redraw();
    },
  });
  drawPairs(prediction);
  drawGeometry(prediction);
  drawTemplates(prediction);
  drawRestraints(prediction);
  drawDesign(prediction);
  drawEnsemble(prediction);
  offerModels(row);
  drawFiles(prediction);
  drawSettings(prediction);
  legend();
  say();
  redraw();
  // The viewer takes its time to start: what is there already is drawn before.
  requestAnimationFrame(() => setTimeout(() => {
    if (!document.body.dataset.ready) document.body.dataset.ready = String(performance.now());
    if (order === chosen) view.show(prediction);
  }));
}

const OF_PAIRS = meta.scores.filter(({ covers }) => covers === 'pair');

function drawPairs({ interfaces }) {
  const pairs = Object.entries((interfaces && interfaces.pairs) || {});
  const table = make('table');
  const head = make('tr');
  head.append(make('th', 'chains'), ...OF_PAIRS.map(({ label }) => make('th', label)));
  table.append(head);
  for (const [name, pair] of pairs) {
    const row = make('tr');
    row.append(make('td', name), ...OF_PAIRS.map(({ key, digits }) => make('td', shown(pair && pair[key], digits))));
    table.append(row);
  }
  let note = interfaces && typeof interfaces.actifptm === 'number' ? `actifpTM of all interfaces: ${interfaces.actifptm.toFixed(3)}` : '';
  if (interfaces && interfaces.reason) note = `no interface scores: ${interfaces.reason}`;
  if (interfaces && interfaces.has_clash === true) note = ['chains overlap: ranked after predictions whose chains do not', note].filter(Boolean).join('; ');
  byId('pairs').replaceChildren(...(pairs.length ? [make('h3', 'Pairs of chains'), table, make('p', note)] : []));
}

function drawFiles({ files }) {
  const place = (name) => name.split('/').map(encodeURIComponent).join('/');
  const links = files.map((name) => make('a', name, { href: place(name), download: name.split('/').pop() }));
  byId('files').replaceChildren(make('h3', 'Files'), ...links);
}

function drawSettings({ config }) {
  const rows = [];
  const add = (value, path) => {
    if (value !== null && typeof value === 'object' && (path.length < 2 || !Array.isArray(value))) {
      for (const [key, inner] of Object.entries(value)) add(inner, [...path, key]);
    } else rows.push([path.join('.'), typeof value === 'string' ? value : JSON.stringify(value)]);
  };
  if (config) add(config, []);
  const table = make('table');
  for (const [key, value] of rows) {
    const row = make('tr');
    row.append(make('td', key), make('td', value));
    table.append(row);
  }
  const details = make('details');
  details.append(make('summary', 'Settings and versions'), table);
  byId('settings').replaceChildren(...(config ? [details] : []));
}

byId('find').addEventListener('input', drawRows);
byId('where').addEventListener('input', drawRows);
byId('best').addEventListener('change', drawRows);
byId('previous').addEventListener('click', () => turn(-1));
byId('next').addEventListener('click', () => turn(1));
byId('matrix').hidden = !hasMatrix;
byId('score').replaceChildren(...pairScores.map(([key, label]) => make('option', label, { value: key })));
byId('score').addEventListener('change', drawMatrix);
byId('matrix').addEventListener('toggle', drawMatrix);
// Arrow keys move a point in the aligned error, ten residues at a time with Shift; Enter marks the scored residue.
let cursor = [0, 0];
byId('pae').addEventListener('keydown', (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!state.prediction || (!step && event.key !== 'Enter')) return;
  event.preventDefault();
  if (!step) {
    state.pin = cursor[1];
    say();
    redraw();
    return;
  }
  const most = state.prediction.length - 1;
  cursor = cursor.map((at, axis) => Math.max(0, Math.min(most, at + step[axis] * (event.shiftKey ? 10 : 1))));
  point(cursor, true);
});
byId('overlay').addEventListener('click', overlay);
byId('together').addEventListener('change', models);
byId('single').addEventListener('click', () => {
  byId('single').hidden = true;
  legend();
  view.show(state.prediction);
});
byId('clear').addEventListener('click', () => select(null));
for (const radio of document.getElementsByName('colour')) {
  radio.addEventListener('change', () => {
    state.colour = radio.value;
    state.block = null;
    select(null);
  });
}
window.addEventListener('resize', redraw);
explain();
drawFailures();
drawScan();
drawHead();
drawRows();
choose(meta.rows[0]);
