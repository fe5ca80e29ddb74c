// What the page carries: packed pieces, unpacked when they are asked for.

const meta = JSON.parse(document.getElementById('meta').textContent);
const cache = new Map();

// The chosen prediction with everything that is known of it; the last few are kept.
async function loadPrediction(row) {
  if (cache.has(row)) return cache.get(row);
  const detail = JSON.parse(await unpackText(row.detail));
  const prediction = { row, ...detail, ...layoutOf(detail) };
  prediction.pae = row.pae ? { ...row.pae, bytes: await unpack(row.pae.blob) } : null;
  prediction.structure = row.structure ? atomsOf(row.structure, await unpack(row.structure.blob)) : null;
  cache.set(row, prediction);
  if (cache.size > 8) cache.delete(cache.keys().next().value);
  return prediction;
}

// Chains by the places of their residues in the complex, from 0. Residues are numbered as in the whole proteins, which
// ranges say for chains with gaps; labels are the numbers of a given structure, with insertion codes.
function layoutOf({ sequences, ranges, chain_ids: ids, labels }) {
  const chains = [];
  const chainOf = [];
  let start = 0;
  sequences.forEach((sequence, number) => {
    const parts = ranges ? ranges[number] : [[1, sequence.length]];
    const numbers = parts.flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, k) => first + k));
    const shownNumbers = labels ? labels[number] : numbers;
    chains.push({ name: ids[number], start, length: sequence.length, sequence, numbers, labels: shownNumbers });
    for (let i = 0; i < sequence.length; i++) chainOf.push(number);
    start += sequence.length;
  });
  return { chains, chainOf, length: start };
}

function residueName(prediction, residue) {
  const chain = prediction.chains[prediction.chainOf[residue]];
  const at = residue - chain.start;
  return `${chain.name} ${meta.residues[chain.sequence[at]] || 'UNK'} ${chain.labels[at]}`;
}

function rangeName(prediction, [from, to]) {
  const names = [];
  for (const chain of prediction.chains) {
    const first = Math.max(from, chain.start);
    const last = Math.min(to, chain.start + chain.length - 1);
    if (first <= last) names.push(`${chain.name} ${chain.labels[first - chain.start]} to ${chain.labels[last - chain.start]}`);
  }
  return names.length > 4 ? `${names[0]} … ${names[names.length - 1]}` : names.join(', ');
}

// Positions in Å and, per atom, its residue and its place among the 37 atoms.
function atomsOf(layout, bytes) {
  const count = layout.atoms;
  const residues = (bytes.length - 6 * count) / 5;
  const values = new DataView(bytes.buffer, bytes.byteOffset + 5 * residues);
  const residue = new Int32Array(count);
  const atom = new Uint8Array(count);
  let number = 0;
  for (let i = 0; i < residues; i++) {
    for (let a = 0; a < 37; a++) {
      if (bytes[5 * i + (a >> 3)] & (128 >> (a & 7))) {
        residue[number] = i;
        atom[number++] = a;
      }
    }
  }
  const position = (k, axis) => values.getInt16(2 * (3 * k + axis), true) * layout.step;
  return { count, residue, atom, position };
}

// The structure as mmCIF, whose residues the viewer numbers as they come here.
function structureText(prediction) {
  const { count, residue, atom, position } = prediction.structure;
  const columns = ['group_PDB', 'id', 'type_symbol', 'label_atom_id', 'label_comp_id', 'label_asym_id',
    'label_entity_id', 'label_seq_id', 'auth_seq_id', 'pdbx_PDB_ins_code', 'auth_asym_id', 'label_alt_id', 'Cartn_x', 'Cartn_y',
    'Cartn_z', 'occupancy', 'B_iso_or_equiv', 'pdbx_PDB_model_num'];
  const lines = ['data_prediction', 'loop_', ...columns.map((column) => '_atom_site.' + column)];
  for (let k = 0; k < count; k++) {
    const i = residue[k];
    const number = prediction.chainOf[i];
    const chain = prediction.chains[number];
    const at = i - chain.start;
    const name = meta.atoms[atom[k]];
    const [, seq, code] = /^(-?\d+)(.*)$/.exec(String(chain.labels[at]));
    const xyz = [0, 1, 2].map((axis) => position(k, axis).toFixed(2)).join(' ');
    lines.push(`ATOM ${k + 1} ${name[0]} ${name} ${meta.residues[chain.sequence[at]] || 'UNK'} ${chain.name} ` +
      `${number + 1} ${at + 1} ${seq} ${code || '?'} ${chain.name} . ${xyz} 1 ${prediction.plddt[i].toFixed(1)} 1`);
  }
  return lines.join('\n') + '\n#\n';
}

function bandOf(plddt) {
  return meta.style.bands.find((band) => plddt >= band.low) || meta.style.bands[meta.style.bands.length - 1];
}

function chainColour(number) {
  return meta.style.chains[number % meta.style.chains.length];
}
