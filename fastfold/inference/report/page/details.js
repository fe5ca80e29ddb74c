// Tables of the chosen prediction: pairs of chains, templates, reference, files, settings; and explanations, failures.

const OF_PAIRS = meta.scores.filter(({ covers }) => covers === 'pair');
const OF_REFERENCE = meta.scores.filter(({ covers }) => covers === 'reference');

function drawPairs({ interfaces }) {
  const pairs = Object.entries((interfaces && interfaces.pairs) || {});
  const byIpsae = [...pairs].sort(([, a], [, b]) => (b.ipsae ?? -1) - (a.ipsae ?? -1));
  const used = OF_PAIRS.filter(({ key }) => pairs.some(([, pair]) => typeof pair[key] === 'number'));
  const table = tableOf(['chains', ...used.map(({ label }) => label)],
    byIpsae.map(([name, pair]) => [name, ...used.map(({ key, digits }) => shown(pair[key], digits))]));
  [...table.rows[0].cells].slice(1).forEach((cell, k) => { cell.title = explanationOf(used[k].name); });
  const notes = [];
  if (interfaces.has_clash === true) notes.push('Chains overlap: ranked after predictions whose chains do not.');
  if (typeof interfaces.actifptm === 'number') notes.push(`actifpTM of all interfaces: ${interfaces.actifptm.toFixed(3)}.`);
  if (interfaces.reason) notes.push(`No interface scores: ${interfaces.reason}.`);
  panel('pairs', 'Interfaces', ...(pairs.length ? [scrolled('scores of pairs of chains', table)] : []), ...(notes.length ? [make('p', notes.join(' '), { class: 'foot' })] : []));
}

function drawTemplates({ templates, forced, reference }) {
  const used = (templates || []).flatMap((one) => (Array.isArray(one.used) ? one.used : [])
    .map((template) => [String(one.chain), String(template.name), shown(template.aligned_residues, 0)]));
  const kept = forced.map((one) => [one.chain, one.name, `${shown(one.within, 0)} of ${shown(one.residues, 0)} residues within ${shown(one.threshold, 1)} Å`, shown(one.rmsd, 2), shown(one.largest_deviation, 2)]);
  panel('templates', 'Templates', ...(used.length ? [scrolled('templates', tableOf(['chain', 'template', 'aligned residues'], used))] : []),
    ...(kept.length ? [scrolled('forced templates', tableOf(['chain', 'forced template', 'kept to', 'RMSD (Å)', 'largest deviation (Å)'], kept))] : []));
  const columns = OF_REFERENCE.filter(({ key }) => reference && reference[key] !== undefined);
  const cells = reference ? [[String(reference.file), ...columns.map(({ key, digits }) => shown(reference[key], digits)), String(reference.chains || '')]] : [];
  byId('agreement-panel').hidden = !(reference && reference.lddt);
  panel('reference', `Compared with ${reference && reference.kind === 'experiment' ? 'an experiment' : `a ${reference ? reference.kind : 'structure'}`}`,
    ...(reference ? [scrolled('comparison', tableOf(['structure', ...columns.map(({ label }) => label), 'chains'], cells))] : []));
}

const addressOf = (name) => name.split('/').map(encodeURIComponent).join('/');
const KINDS = [['.cif', 'mmCIF'], ['.pdb', 'PDB'], ['_pae.json', 'aligned error'], ['_scores.json', 'scores'], ['_config.json', 'settings'],
  ['_coverage.json', 'coverage'], ['.result.zip', 'all models'], ['.png', 'plot']];

function drawFiles({ files }) {
  const kindOf = (name) => KINDS.findIndex(([ending]) => name.endsWith(ending));
  const links = [...files].sort((a, b) => (kindOf(a) + 1 || 99) - (kindOf(b) + 1 || 99)).map((name, number) => {
    const own = name.split('/').pop();
    const kind = KINDS[kindOf(name)];
    const label = kind ? `${own.includes('_relaxed') ? 'relaxed ' : ''}${kind[1]}` : own;
    return make('a', label, { class: number ? 'button' : 'button first', href: addressOf(name), download: own, title: own });
  });
  panel('files', 'Files', make('div', undefined, { class: 'body' }, ...links), make('p', 'They lie in the folder of this page.', { class: 'foot' }));
}

function drawSettings({ config }) {
  const rows = [];
  const add = (value, path) => {
    if (value !== null && typeof value === 'object' && (path.length < 2 || !Array.isArray(value))) {
      for (const [key, inner] of Object.entries(value)) add(inner, [...path, key]);
    } else rows.push([path.join('.'), typeof value === 'string' ? value : JSON.stringify(value)]);
  };
  if (config) add(config, []);
  const table = tableOf(['setting', 'value'], rows);
  table.classList.add('plain');
  byId('settings').hidden = !config;
  byId('settings').replaceChildren(make('summary', 'Settings and versions'), make('div', undefined, {}, table));
}

function drawExplanations() {
  const list = make('dl');
  const isUsed = ({ name, meaning, covers }) => meaning && (covers === 'geometry' || columns.some(([key]) => key === name));
  for (const { name, label } of meta.scores.filter(isUsed)) list.append(make('dt', label), make('dd', explanationOf(name)));
  byId('explanations').replaceChildren(make('summary', 'Meaning of the scores'), list);
}

function drawFailures() {
  const list = make('ul');
  for (const [target, reason] of meta.failures) list.append(make('li', `${target}: ${reason}`));
  byId('failures').hidden = meta.failures.length === 0;
  byId('failures').replaceChildren(make('summary', counted(meta.failures.length, 'failed target')), list);
}

function drawTables() {
  byId('tables').hidden = meta.tables.length === 0;
  byId('tables').replaceChildren(...meta.tables.map((name) => make('a', name, { class: 'button', href: addressOf(name), download: name })));
}
