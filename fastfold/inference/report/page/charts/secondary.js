// Helices and strands of a structure by its hydrogen bonds (Kabsch & Sander 1983, doi:10.1002/bip.360221211).

const BOND = -0.5; // kcal/mol, the largest energy of a hydrogen bond
const CHARGES = 27.9; // kcal/mol Å, of the partial charges of C=O and N-H
const NEAR = 9; // Å between alpha carbons of residues whose groups can bond

// Backbone atoms of each residue; `h` lies 1 Å from N, opposite to the C=O before it.
function backboneOf({ structure, chainOf, length }) {
  const places = new Map(['N', 'CA', 'C', 'O'].map((name) => [meta.atoms.indexOf(name), name]));
  const found = Array.from({ length }, () => ({}));
  for (let k = 0; k < structure.count; k++) {
    const name = places.get(structure.atom[k]);
    if (name) found[structure.residue[k]][name] = [0, 1, 2].map((axis) => structure.position(k, axis));
  }
  found.forEach((residue, i) => {
    const before = found[i - 1];
    if (!residue.N || !before || !before.C || !before.O || chainOf[i] !== chainOf[i - 1]) return;
    const size = distance(before.C, before.O) || 1;
    residue.h = residue.N.map((x, axis) => x + (before.C[axis] - before.O[axis]) / size);
  });
  return found;
}

const distance = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);

// A letter for each residue: H in a helix of at least four residues, E in a bridge or ladder, empty otherwise.
function secondaryStructure(prediction) {
  if (!prediction.structure) return null;
  const { chains, chainOf, length } = prediction;
  const backbone = backboneOf(prediction);
  const bonds = new Set(); // i * length + j: C=O of i to N-H of j
  for (let i = 0; i < length; i++) {
    for (let j = 0; j < length; j++) {
      const [acceptor, donor] = [backbone[i], backbone[j]];
      if (j === i || j === i + 1 || !acceptor.O || !acceptor.C || !donor.h || distance(acceptor.CA || acceptor.C, donor.CA || donor.N) > NEAR) continue;
      const energy = CHARGES * (1 / distance(acceptor.O, donor.N) + 1 / distance(acceptor.C, donor.h) - 1 / distance(acceptor.O, donor.h) - 1 / distance(acceptor.C, donor.N));
      if (energy < BOND) bonds.add(i * length + j);
    }
  }
  const has = (i, j) => i >= 0 && j >= 0 && i < length && j < length && bonds.has(i * length + j);
  const letters = new Array(length).fill('');
  const within = (i) => i > 0 && i < length - 1 && chainOf[i - 1] === chainOf[i + 1];
  for (const bond of bonds) {
    const [from, to] = [Math.floor(bond / length), bond % length];
    for (let k = 0; k < 9; k++) {
      const [i, j] = [from + Math.floor(k / 3) - 1, to + (k % 3) - 1].sort((x, y) => x - y);
      if (j - i < 3 || !within(i) || !within(j)) continue;
      const isParallel = (has(i - 1, j) && has(j, i + 1)) || (has(j - 1, i) && has(i, j + 1));
      const isAntiparallel = (has(i, j) && has(j, i)) || (has(i - 1, j + 1) && has(j - 1, i + 1));
      if (isParallel || isAntiparallel) letters[i] = letters[j] = 'E';
    }
  }
  for (const { start, length: size } of chains) {
    const turn = (i) => i >= start && i + 4 < start + size && has(i, i + 4);
    for (let i = start + 1; i < start + size; i++) if (turn(i) && turn(i - 1)) letters.fill('H', i, i + 4);
  }
  return letters;
}
