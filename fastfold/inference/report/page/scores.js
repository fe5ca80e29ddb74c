// Explanations of the scores, failures, sequences, templates, and comparisons.

const DIRECTIONS = { higher: ' Higher is better.', lower: ' Lower is better.', '': '' };
const EXPLANATIONS = new Map(meta.scores.filter(({ meaning }) => meaning)
  .map(({ name, meaning, better }) => [name, meaning + DIRECTIONS[better]]));

function explain() {
  const list = make('dl');
  for (const [key, label] of columns) {
    if (EXPLANATIONS.has(key)) list.append(make('dt', label), make('dd', EXPLANATIONS.get(key)));
  }
  byId('explanations').replaceChildren(make('summary', 'Meaning of the scores'), list);
}

function drawFailures() {
  const failures = meta.failures || [];
  const list = make('ul');
  for (const [target, reason] of failures) list.append(make('li', `${target}: ${reason}`));
  byId('failures').hidden = failures.length === 0;
  byId('failures').replaceChildren(make('summary', `${failures.length} failed target${failures.length === 1 ? '' : 's'}`), list);
}

function drawScan() {
  if (!meta.scan) return;
  byId('scan').append(make('img', undefined, { src: meta.scan, alt: 'heat maps of the mutants', style: 'max-width: 100%' }));
  byId('scan').hidden = false;
}

// Letters of all chains, coloured by pLDDT; pointing and keys work as in the charts.
const LONGEST_TRACK = 5000;

function drawSequence(prediction, { hover, pick }) {
  const track = byId('sequence');
  track.replaceChildren();
  if (prediction.length > LONGEST_TRACK) return;
  for (const chain of prediction.chains) {
    const line = make('p');
    line.append(make('strong', chain.name));
    for (let at = 0; at < chain.length; at++) {
      const residue = chain.start + at;
      if (at % 10 === 0 || chain.numbers[at] !== chain.numbers[at - 1] + 1) line.append(make('small', String(chain.labels[at])));
      const letter = make('span', chain.sequence[at]);
      letter.dataset.residue = String(residue);
      letter.style.borderBottomColor = bandOf(prediction.plddt[residue]).colour;
      line.append(letter);
    }
    track.append(line);
  }
  const residueOf = (event) => (event.target.dataset.residue === undefined ? null : Number(event.target.dataset.residue));
  track.onpointermove = (event) => hover(residueOf(event));
  track.onpointerleave = () => hover(null);
  track.onclick = (event) => { if (residueOf(event) !== null) pick(residueOf(event)); };
}

function drawTable(place, title, head, rows) {
  const table = make('table');
  const first = make('tr');
  first.append(...head.map((label) => make('th', label)));
  table.append(first);
  for (const cells of rows) {
    const row = make('tr');
    row.append(...cells.map((text) => make('td', text)));
    table.append(row);
  }
  byId(place).replaceChildren(...(rows.length ? [make('h3', title), table] : []));
}

function drawTemplates({ templates, reference }) {
  const used = (templates || []).flatMap((one) => (Array.isArray(one.used) ? one.used : [])
    .map((template) => [String(one.chain), String(template.name), shown(template.aligned_residues, 0)]));
  drawTable('templates', 'Templates', ['chain', 'template', 'aligned residues'], used);
  const columns = [['TM-score', 'tm_score'], ['lDDT-CA', 'lddt_ca'], ['GDT-TS', 'gdt_ts'], ['DockQ', 'dockq'], ['iLDDT', 'lddt_interface']]
    .filter(([, key]) => reference && reference[key] !== undefined);
  const found = reference ? [[String(reference.file), ...columns.map(([, key]) => shown(reference[key], 3)), String(reference.chains || '')]] : [];
  drawTable('reference', 'Compared with an experiment', ['structure', ...columns.map(([label]) => label), 'chains'], found);
}
