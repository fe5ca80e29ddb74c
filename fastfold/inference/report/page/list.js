// The table of predictions, the list of targets at the side, and which of them a folder needs.

const has = (key) => meta.rows.some((row) => row[key] !== undefined && row[key] !== null);
const ALL_COLUMNS = ['name', 'mutation', 'sequence', 'model', 'seed', 'sample', 'rank', 'partner_1', 'partner_2', 'length',
  ...meta.scores.filter(({ shown: place }) => place === 'list').map(({ name }) => name), 'filters', 'note', 'seconds', 'peak_memory'];
const NAMES = { name: 'target', partner_1: 'partner 1', partner_2: 'partner 2', length: 'residues', peak_memory: 'memory (MiB)' };
const TEXT = new Set(['name', 'sample', 'partner_1', 'partner_2', 'model', 'mutation', 'sequence', 'filters', 'note']);
const FROM_SMALL = new Set(['rank', 'seed', 'order', 'loss', 'rmsd', 'interface_pae']);
const LATE = new Set(['model', 'seed', 'contacts', 'interface_pae', 'dplddt', 'dpae', 'rmsd', 'iptm', 'length']);
const PAGE_ROWS = 100;
const SIDE_ROWS = 200;

// Products by their key columns and first order, the special before the general ones.
const PRODUCTS = [
  { is: mutants.length > 0, key: 'dplddt_site', isDown: false, columns: ['name', 'mutation', 'dplddt_site', 'dplddt', 'dpae_site', 'dpae', 'strain_site'] },
  { is: meta.designs.length > 0, key: 'order', isDown: false, columns: ['name', 'loss', 'sequence', 'filters', 'note', 'mean_plddt', 'ptm', 'iptm'] },
  { is: isScreen, key: 'ipsae', isDown: true, columns: ['partner_1', 'partner_2', 'rank', 'ipsae', 'iptm', 'pdockq2', 'interface_pae', 'contacts'] },
  { is: has('composite'), key: 'composite', isDown: true, columns: ['name', 'composite', 'given_tm', 'mean_plddt', 'ptm'] },
];
const targets = new Set(meta.rows.map((row) => row.target));
const product = PRODUCTS.find((one) => one.is && targets.size > 1);
const kind = product ? 'list' : targets.size > 1 ? 'targets' : 'single';
const PLAIN = ['name', 'model', 'seed', 'sample', 'rank', 'length', 'mean_plddt', 'ptm', 'iptm', 'ipsae'];
const sorting = product ? { key: product.key, isDown: product.isDown } : { key: null, isDown: false };
const hasRanks = meta.rows.some((row) => row.rank > 1);
const columns = ALL_COLUMNS.filter(has).map((key) => [key, NAMES[key] || labelOf(key)]);
let page = 0;
let kept = [];

function shownColumns() {
  const keys = byId('wide').checked ? ALL_COLUMNS : (product ? product.columns : PLAIN).filter((key) => key !== 'rank' || !product || (hasRanks && !byId('best').checked));
  return keys.map((key) => columns.find(([name]) => name === key)).filter(Boolean);
}

function cellText(key, value) {
  if (key === 'name' || !SCORES.has(key)) return shown(value, key === 'seconds' ? 1 : 0);
  return scoreText(key, value);
}

function drawHead() {
  const row = make('tr');
  for (const [key, label] of shownColumns()) {
    const cell = make('th', undefined, { scope: 'col', class: `${TEXT.has(key) ? 'text' : ''} ${LATE.has(key) ? 'late' : ''}` });
    if (sorting.key === key) cell.setAttribute('aria-sort', sorting.isDown ? 'descending' : 'ascending');
    const button = make('button', label + (sorting.key === key ? (sorting.isDown ? ' ▾' : ' ▴') : ''), { type: 'button', title: explanationOf(key) });
    button.addEventListener('click', () => {
      sorting.isDown = sorting.key === key ? !sorting.isDown : !TEXT.has(key) && !FROM_SMALL.has(key);
      sorting.key = key;
      drawHead();
      drawRows();
    });
    cell.append(button);
    row.append(cell);
  }
  document.querySelector('#list thead').replaceChildren(row);
}

// A bar of a score's share of its scale in front of the first score of a ranking.
function railOf(key, value) {
  const { scale } = SCORES.get(key);
  const share = 100 * Math.max(0, Math.min(1, value / (scale ? scale.largest : 1)));
  return make('span', undefined, { class: 'rail', 'aria-hidden': 'true', style: `background: linear-gradient(90deg, var(--accent) ${share}%, var(--blank) ${share}%)` });
}

function rowElement(data) {
  const row = make('tr', undefined, { tabindex: '0', 'aria-selected': String(Boolean(state.prediction && state.prediction.row === data)) });
  for (const [key] of shownColumns()) {
    const text = cellText(key, data[key]);
    const cell = make('td', text, { class: `${TEXT.has(key) ? 'text' : ''} ${LATE.has(key) ? 'late' : ''} ${key === 'sequence' ? 'letters' : ['filters', 'note'].includes(key) ? 'narrow' : ''}`, ...(TEXT.has(key) ? { title: text } : {}) });
    if (key === sorting.key && ['ipsae', 'composite'].includes(key) && typeof data[key] === 'number') cell.prepend(railOf(key, data[key]));
    if (key === 'filters' && data.filters) cell.replaceChildren(make('span', text, { class: `pill ${text === 'passed' ? 'good' : 'poor'}` }));
    row.append(cell);
  }
  row.addEventListener('click', () => visit(data));
  row.addEventListener('keydown', (event) => {
    const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    if (next) next.focus();
    if (event.key === 'Enter' || event.key === ' ') visit(data);
    if (next || event.key === 'Enter' || event.key === ' ') event.preventDefault();
  });
  return row;
}

function drawRows() {
  page = 0;
  kept = filteredRows();
  if (sorting.key) kept = sortedRows(kept, sorting.key, sorting.isDown);
  drawPage();
  drawMatrix();
  const number = new Set(kept.map((row) => row.target)).size;
  byId('count').textContent = `${counted(number, 'target')}, ${counted(kept.length, 'prediction')}`;
}

function drawPage() {
  const from = page * PAGE_ROWS;
  const rows = kept.slice(from, from + PAGE_ROWS);
  document.querySelector('#list tbody').replaceChildren(...rows.map(rowElement));
  byId('list').scrollTop = 0;
  byId('pages').hidden = kept.length <= PAGE_ROWS;
  byId('page').textContent = `${from + 1} to ${from + rows.length} of ${kept.length.toLocaleString('en')}`;
  byId('previous').disabled = page === 0;
  byId('next').disabled = from + PAGE_ROWS >= kept.length;
}

function turn(step) {
  page += step;
  drawPage();
}

const partners = new PartnerMatrix(byId('cells'), {
  choose: (row) => visit(row),
  note: (text) => { byId('cell').textContent = text || 'Point, or use the arrow keys; Enter opens a pair.'; },
});

function drawMatrix() {
  if (isScreen) partners.show(kept.filter((row) => row.partner_1 !== undefined), byId('score').value, () => state.prediction && state.prediction.row);
}

// One entry a target, its best prediction.
function drawSide() {
  if (kind !== 'targets') return;
  const words = wordsOf('side-find');
  const best = new Map();
  for (const row of meta.rows) if (hasWords(row, words) && !best.has(row.target)) best.set(row.target, row);
  const rows = [...best.values()];
  byId('side-count').textContent = rows.length > SIDE_ROWS ? `${SIDE_ROWS} of ${rows.length.toLocaleString('en')}` : `${rows.length} of ${targets.size}`;
  byId('side-list').replaceChildren(...rows.slice(0, SIDE_ROWS).map((row) => {
    const button = make('button', undefined, { type: 'button' }, make('strong', row.name));
    button.dataset.target = row.target;
    if (typeof row.mean_plddt === 'number') {
      button.append(make('span', row.mean_plddt.toFixed(1), { title: 'mean pLDDT of the best model' },
        make('i', undefined, { style: `background: ${bandOf(row.mean_plddt).color}` })));
    }
    button.addEventListener('click', () => visit(row));
    return make('li', undefined, {}, button);
  }));
  markList();
}

// Show which row is chosen, in both lists.
function markList() {
  const row = state.prediction && state.prediction.row;
  document.querySelectorAll('#list tbody tr').forEach((one, number) => one.setAttribute('aria-selected', String(kept[page * PAGE_ROWS + number] === row)));
  document.querySelectorAll('#side-list button').forEach((one) => one.setAttribute('aria-current', String(Boolean(row && one.dataset.target === row.target))));
}

// Arrange the page by its kind, and say in a headline what is in a list.
function arrange() {
  byId('main').dataset.kind = kind;
  byId('side').hidden = kind !== 'targets';
  byId('overview').hidden = kind !== 'list';
  byId('matrix').hidden = !isScreen;
  byId('table').hidden = meta.rows.length < 2;
  if (meta.designs.length) arrangeDesigns();
  if (kind !== 'list') byId('tiles').after(byId('design'));
  if (kind !== 'list') return;
  byId('table').open = true;
  byId('best').checked = true;
  byId('overview').append(byId('table'), byId('matrix'), byId('design'), byId('statistics'));
  const [headline, subline, title] = headlines();
  byId('headline').textContent = headline;
  byId('subline').textContent = subline;
  byId('table-title').textContent = title;
}

function headlines() {
  const best = meta.rows.filter((row) => (row.rank || 1) === 1);
  if (mutants.length) {
    return [`${counted(new Set(mutants.map((row) => row.mutation)).size, 'mutant')} and the wild type`,
      'Differences are those of the network’s predictions, mutant minus wild type; they are no measured stabilities.', 'Mutants'];
  }
  if (meta.designs.length) {
    const verdicts = best.filter((row) => row.filters);
    const passed = verdicts.filter((row) => row.filters === 'passed').length;
    const number = best.filter((row) => row.order !== undefined).length;
    return [verdicts.length ? `${passed} of ${counted(verdicts.length, 'design')} pass${passed === 1 ? 'es' : ''} all filters` : counted(number || best.length, 'design'),
      'Ranked by filters passed, then by the confidence of the best fold.', 'Ranked designs'];
  }
  if (isScreen) {
    const { scale } = SCORES.get('iptm');
    const confident = best.filter((row) => typeof row.iptm === 'number' && rangeOf(scale, row.iptm) === scale.cuts.length).length;
    const [first, second] = ['partner_1', 'partner_2'].map((key) => new Set(best.map((row) => row[key])).size);
    return [`${confident} of ${counted(best.length, 'pair')} with a confident ipTM`,
      `${first} × ${second} partners; ipTM from ${scale.cuts[scale.cuts.length - 1]} counts as confident (${scale.source}). Best ipSAE first.`, 'Ranked pairs'];
  }
  return [`${counted(best.length, 'given structure')}`, 'Ranked by the composite score of pLDDT, pTM and TM-score to the given structure.', 'Ranked structures'];
}
