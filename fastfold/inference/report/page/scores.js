// Explanations of the scores, with the thresholds of their papers.

const EXPLANATIONS = {
  composite: ['composite', '0 to 1: pLDDT × pTM × TM-score to the given structure, which ranks structures of one protein (AF2Rank, Roney & Ovchinnikov 2022). Higher is better.'],
  given_tm: ['TM to given', '0 to 1: TM-score of the prediction to the structure that was scored.'],
  mean_plddt: ['mean pLDDT', '0 to 100: expected lDDT-CA. Above 90 very high, 70 to 90 high, 50 to 70 low, below 50 very low or disordered (AlphaFold DB).'],
  ptm: ['pTM', '0 to 1: expected TM-score. Above 0.5 the overall fold is probably right.'],
  iptm: ['ipTM', '0 to 1: expected TM-score over pairs of residues in different chains. Above 0.8 the interface is confident, below 0.6 probably wrong.'],
  dplddt: ['ΔpLDDT', 'Mean pLDDT of a mutant minus that of the wild type, over pairs of predictions by one network with one seed.'],
  dpae: ['ΔPAE', 'Mean aligned error of a mutant minus that of the wild type, in Å.'],
  strain: ['strain', 'Mean effective strain of a mutant: mean change of the vectors to neighbours within 13 Å, divided by their lengths (McBride et al. 2023).'],
  ipsae_max: ['ipSAE', '0 to 1: TM-score of the other chain over pairs with a small aligned error, so that disordered parts do not lower it (Dunbrack 2025). Higher is better.'],
  pdockq: ['pDockQ', '0 to 0.74, from contacts and their pLDDT. Above 0.23 the interface is probably right, above 0.5 more so (Bryant et al. 2022).'],
  pdockq2: ['pDockQ2', '0 to 1, from contacts, their pLDDT and aligned error. Above 0.23 the interface is probably right (Zhu et al. 2023).'],
  lis: ['LIS', '0 to 1: mean of (12 − PAE) / 12 over pairs below 12 Å. Above 0.2 an interaction is likely (Kim et al. 2024).'],
  actifptm: ['actifpTM', '0 to 1: ipTM where pairs count by their probability to touch (Varga et al. 2025). Higher is better.'],
  contacts: ['contacts', 'Pairs of residues of two chains with CB atoms at most 8 Å apart.'],
  interface_pae: ['interface PAE', 'Mean aligned error of the pairs that touch, in Å. Lower is better.'],
  clashes: ['clashes', 'Pairs of atoms of different chains that overlap. Many mean that the prediction is wrong.'],
  relaxed_energy: ['energy', 'Energy after relaxation in the Amber force field.'],
};

function explain() {
  const known = columns.map(([key]) => key).filter((key) => EXPLANATIONS[key]);
  const list = make('dl');
  for (const key of known) list.append(make('dt', EXPLANATIONS[key][0]), make('dd', EXPLANATIONS[key][1]));
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
