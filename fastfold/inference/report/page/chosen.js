// The chosen prediction: its panels, its models as tabs, and structures shown together.

const MOST_TABS = 8;

const landscape = new Landscape(byId('landscape'), {
  choose: (row) => visit(row),
  hover: (member) => {
    byId('ensemble-note').textContent = member ? sampleName(member) : landscape.note;
  },
});

const modelName = ({ model, seed, sample }) => `${model}, seed ${seed}${sample ? `, ${sample}` : ''}`;
const sampleName = ({ row, cluster }) => `${modelName(row)}: cluster ${cluster}, mean pLDDT ${shown(row.mean_plddt, 1)}`;

function drawEnsemble({ row }) {
  landscape.show(row);
  byId('ensemble').hidden = !landscape.ensemble;
  byId('ensemble-note').textContent = landscape.note;
  byId('single').hidden = true;
  if (!landscape.ensemble) return;
  byId('overlay').hidden = !meta.viewer || landscape.ensemble.overlay.length === 0;
  byId('ensemble-files').replaceChildren(...landscape.ensemble.files.map((name) =>
    make('a', name.slice(row.target.length + 1), { class: 'button', href: addressOf(name), download: name, title: name })));
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

// The reference, superposed on the prediction.
async function withReference() {
  const order = chosen;
  const { prediction } = state;
  const { reference } = prediction;
  if (!byId('compared').checked) {
    legend();
    view.show(prediction);
    return;
  }
  byId('together').checked = false;
  const structure = atomsOf(reference.structure, await inflate(reference.structure.packed));
  if (order !== chosen || !byId('compared').checked) return;
  const { prediction: placed, rmsd } = moved({ ...prediction, structure }, prediction);
  const figures = [rmsd === null ? '' : `RMSD ${rmsd.toFixed(1)} Å`, typeof reference.tm_score === 'number' ? `TM-score ${reference.tm_score.toFixed(2)}` : ''];
  const name = `${reference.kind} ${reference.file} (${figures.filter(Boolean).join(', ')})`;
  showTogether([{ prediction, colour: chainColour(0), name: 'prediction' }, { prediction: placed, colour: chainColour(1), name }]);
}

function offerReference({ reference, structure }) {
  byId('compared').checked = false;
  byId('with-reference').hidden = !meta.viewer || !structure || !(reference && reference.structure);
  if (reference) byId('with-reference').lastChild.textContent = ` with the ${reference.kind}`;
}

// All models of the target, superposed on the first.
async function models() {
  const order = chosen;
  byId('compared').checked = false;
  if (!byId('together').checked) {
    legend();
    view.show(state.prediction);
    return;
  }
  const predictions = await Promise.all(modelsOf(state.prediction.row).map(loadPrediction));
  if (order !== chosen || !byId('together').checked) return;
  showTogether(predictions.map((one, number) => {
    const { prediction, rmsd } = number ? moved(one, predictions[0]) : { prediction: one, rmsd: null };
    const name = `${one.row.rank ? `rank ${one.row.rank}` : modelName(one.row)}${rmsd === null ? '' : ` (${rmsd.toFixed(1)} Å)`}`;
    return { prediction, colour: chainColour(number), name };
  }));
}

function showTogether(items) {
  byId('legend').replaceChildren(...legendOf(items.map(({ colour, name }) => [colour, name])));
  view.showTogether(items);
}

function offerModels(row) {
  const number = modelsOf(row).length;
  byId('together').checked = false;
  byId('models').hidden = !meta.viewer || number < 2;
  byId('models').lastChild.textContent = ` ${number} models together`;
}

// Models of the target by rank; the rest of many are in a list.
function drawTabs(row) {
  const rows = meta.rows.filter((one) => one.target === row.target);
  byId('tabs').hidden = rows.length < 2;
  const first = rows.slice(0, MOST_TABS);
  if (!first.includes(row)) first[MOST_TABS - 1] = row;
  byId('tabs').replaceChildren(...first.map((one, number) => {
    const score = typeof one.iptm === 'number' ? `ipTM ${one.iptm.toFixed(2)}` : `pLDDT ${shown(one.mean_plddt, 1)}`;
    const tab = make('button', undefined, { type: 'button', role: 'tab', 'aria-controls': 'model', 'aria-selected': String(one === row), tabindex: one === row ? '0' : '-1' },
      make('strong', one.rank ? `Rank ${one.rank}` : `Model ${number + 1}`), make('small', `${modelName(one)} · ${score}`));
    tab.addEventListener('click', () => visit(one));
    tab.addEventListener('keydown', async (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      await visit(first[(number + step + first.length) % first.length]);
      document.querySelector('#tabs [aria-selected="true"]').focus();
    });
    return tab;
  }));
  byId('tabs').parentElement.querySelectorAll(':scope > select').forEach((old) => old.remove());
  if (rows.length <= MOST_TABS) return;
  const more = make('select', undefined, { 'aria-label': 'all models of this target' }, ...rows.map((one, number) => {
    const option = make('option', `${one.rank ? `rank ${one.rank}: ` : ''}${modelName(one)}`, { value: String(number) });
    option.selected = one === row;
    return option;
  }));
  more.addEventListener('change', () => visit(rows[Number(more.value)]));
  byId('tabs').after(more);
}

let chosen = 0;
async function choose(row) {
  const order = ++chosen;
  const prediction = await loadPrediction(row);
  if (order !== chosen) return;
  Object.assign(state, { prediction, hover: null, pin: null, block: null });
  byId('detail').hidden = false;
  byId('clear').disabled = true;
  byId('name').textContent = row.mutation || prediction.name;
  const facts = [`chain${prediction.chains.length > 1 ? 's' : ''} ${prediction.chains.map((chain) => `${chain.name} (${chain.length})`).join(', ')}`, modelName(row)];
  if (prediction.relaxed) facts.push('relaxed structure');
  if (prediction.not_relaxed) facts.push(`not relaxed: ${prediction.not_relaxed}`);
  byId('summary').textContent = facts.join(' · ');
  markList();
  drawTabs(row);
  drawVerdict(prediction);
  drawTiles(prediction);
  drawEnsemble(prediction);
  drawRestraints(prediction);
  view.block = null;
  pae.show(prediction);
  plddt.show(prediction, plddtScale(prediction));
  coverage.show(prediction, coverageScale(prediction));
  agreement.show(prediction, agreementScale(prediction));
  drawNotes(prediction);
  drawSequence(prediction, { hover: (residue) => point(residue === null ? null : [residue, residue], true), pick: pin });
  drawPairs(prediction);
  drawGeometry(prediction);
  drawTemplates(prediction);
  drawDesign(prediction);
  offerModels(row);
  offerReference(prediction);
  drawFiles(prediction);
  drawSettings(prediction);
  drawMatrix();
  scan.draw();
  legend();
  say();
  redraw();
  // The viewer takes its time to start: what is there already is drawn before.
  requestAnimationFrame(() => setTimeout(() => {
    if (!document.body.dataset.ready) document.body.dataset.ready = String(performance.now());
    if (order === chosen) view.show(prediction);
  }));
}

function drawNotes({ pae: errors, coverage: depths, chains, row }) {
  byId('pae-scale').hidden = !errors;
  if (errors) ramp('pae-scale', '0', `${errors.max.toFixed(0)} Å`, meta.style.pae);
  byId('pae-note').textContent = errors
    ? (errors.stride > 1 ? `Means over squares of ${errors.stride} residues.` : '')
    : row.omitted ? 'The page has no room for the aligned error of this prediction; its file has it.' : 'The network of this prediction gives no aligned error, or its file is missing.';
  byId('coverage-panel').hidden = !depths;
  if (!depths) return;
  const rows = depths.rows.map((number, chain) => `${chains[chain].name}: ${Number(number).toLocaleString('en')}`).join(', ');
  byId('coverage-note').textContent = `Alignment rows by identity to the query, darker is more alike; ${rows} rows.`;
}

const scan = new MutationScan({ choose: (row) => visit(row), chosen: () => state.prediction && state.prediction.row });
