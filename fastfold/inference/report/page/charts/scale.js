// Scores with their words: text of a value, tooltip, and tiles of a figure on its scale.

const SCORES = new Map(meta.scores.map((one) => [one.name, one]));
const DIRECTIONS = { higher: ' Higher is better.', lower: ' Lower is better.', '': '' };
const labelOf = (name) => (SCORES.has(name) ? SCORES.get(name).label : name);

function scoreText(name, value) {
  const one = SCORES.get(name);
  if (typeof value !== 'number' || !one) return shown(value, 0);
  if (one.is_share) return `${(100 * value).toFixed(one.digits)} %`;
  return one.covers === 'mutant' && name.startsWith('d') ? signed(value, one.digits) : shown(value, one.digits);
}

function explanationOf(name) {
  const one = SCORES.get(name);
  if (!one || !one.meaning) return '';
  return one.meaning + DIRECTIONS[one.better] + (one.scale ? ` Limits: ${one.scale.source}.` : '');
}

const rangeOf = (scale, value) => scale.cuts.filter((cut) => value >= cut).length;

// Fills of a scale's ranges: the bands of pLDDT for four ranges, otherwise by their tones.
function fillsOf(scale) {
  const bands = meta.style.bands.map(({ color }) => color);
  if (scale.words.length === bands.length) return [...bands].reverse();
  return scale.tones.map((tone) => bands[{ good: 1, fair: 2, poor: 3 }[tone]]);
}

function meterOf(scale, value) {
  const edges = [0, ...scale.cuts, scale.largest];
  if (edges.some((edge, k) => k && edge - edges[k - 1] < 0.05 * scale.largest)) return []; // too narrow to be seen
  const at = (edge) => 100 * Math.max(0, Math.min(1, edge / scale.largest));
  const meter = make('div', undefined, { class: 'meter', 'aria-hidden': 'true' });
  fillsOf(scale).forEach((colour, k) => meter.append(make('i', undefined, { style: `flex: ${edges[k + 1] - edges[k]}; background: ${colour}` })));
  meter.append(make('em', undefined, { style: `left: ${at(value)}%` }));
  const stops = make('div', undefined, { class: 'stops', 'aria-hidden': 'true' });
  const isNear = (edge) => scale.largest - edge < 0.16 * scale.largest;
  for (const edge of edges.filter((one) => one < scale.largest || !scale.cuts.some(isNear))) {
    stops.append(make('span', String(edge), { style: `left: ${at(edge)}%` }));
  }
  return [meter, stops];
}

function tile(name, value, note) {
  const { scale } = SCORES.get(name);
  const box = make('section', undefined, { class: 'tile', title: explanationOf(name) });
  const figure = make('p', undefined, {}, make('span', scoreText(name, value), { class: 'figure' }));
  if (scale) figure.append(make('span', scale.words[rangeOf(scale, value)], { class: `word ${scale.tones[rangeOf(scale, value)]}` }));
  box.append(make('h3', labelOf(name)), figure, ...(scale ? meterOf(scale, value) : []), make('p', note || briefOf(name), { class: 'note' }));
  return box;
}

// The first sentence of a score's meaning, without its range and without the paper.
function briefOf(name) {
  return SCORES.get(name).meaning.split(/\. |\.$/)[0].replace(/^0 to [\d.]+[:,] /, '').replace(/ \([^)]*\)/, '');
}

function factTile(label, figure, note) {
  return make('section', undefined, { class: 'tile' }, make('h3', label),
    make('p', undefined, {}, make('span', figure, { class: 'figure' })), make('p', note, { class: 'note' }));
}

const OF_CHAIN = ['mean_plddt', 'ptm'];
const OF_COMPLEX = ['iptm', 'ipsae', 'pdockq2', 'mean_plddt'];
const OF_PRODUCTS = ['composite', 'given_tm', 'dplddt_site', 'dpae_site', 'strain_site', 'loss', 'rmsd'];

function drawTiles(prediction) {
  const { row, geometry, alignment_rows: rows } = prediction;
  const names = [...OF_PRODUCTS, ...(row.partner_1 === undefined && row.iptm === undefined ? OF_CHAIN : OF_COMPLEX)];
  const tiles = names.filter((name) => typeof row[name] === 'number').map((name) => tile(name, row[name]));
  if (geometry) {
    const outliers = Math.round((geometry.figures.ramachandran_outliers || 0) * geometry.regions.filter((region) => region >= 0).length);
    tiles.push(tile('ramachandran_favoured', geometry.figures.ramachandran_favoured, `of the backbone’s angles, ${counted(outliers, 'outlier')}`));
  }
  if (rows === 0) tiles.push(factTile('Alignment', 'none', 'folded from the sequence alone; an alignment makes most predictions better'));
  else if (typeof rows === 'number') tiles.push(factTile('Alignment', rows.toLocaleString('en'), 'rows of all chains'));
  byId('tiles').replaceChildren(...tiles);
}

function drawVerdict({ verdict }) {
  const { tone, word, text, rule } = verdict;
  const place = byId('verdict');
  place.className = tone;
  place.title = rule;
  place.replaceChildren(make('strong', word), text, make('span', ` Rule: ${rule}`, { class: 'unseen' }));
}
