// Models of one target, superposed on the first by their alpha carbons.

const MOST_MODELS = 8;

// The rows of the models of a target with a structure, best first.
function modelsOf(row) {
  const found = meta.rows.filter((one) => one.target === row.target && one.structure && one.length === row.length);
  return found.sort((a, b) => (a.rank || Infinity) - (b.rank || Infinity)).slice(0, MOST_MODELS);
}

function alphaCarbons({ structure }) {
  const ca = meta.atoms.indexOf('CA');
  const found = new Map();
  for (let k = 0; k < structure.count; k++) {
    if (structure.atom[k] === ca) found.set(structure.residue[k], [0, 1, 2].map((axis) => structure.position(k, axis)));
  }
  return found;
}

// A prediction moved onto another one of the target, and the distance of their alpha carbons in Å (RMSD).
function moved(prediction, first) {
  const [own, others] = [alphaCarbons(prediction), alphaCarbons(first)];
  const common = [...own.keys()].filter((residue) => others.has(residue));
  const from = common.map((residue) => own.get(residue));
  const to = common.map((residue) => others.get(residue));
  if (common.length < 3) return { prediction, rmsd: null };
  const move = superposition(from, to);
  const squares = from.map((point, i) => Math.hypot(...move(point).map((x, axis) => x - to[i][axis])) ** 2);
  const { structure } = prediction;
  const places = Array.from({ length: structure.count }, (_, k) => move([0, 1, 2].map((axis) => structure.position(k, axis))));
  const position = (k, axis) => places[k][axis];
  const rmsd = Math.sqrt(squares.reduce((sum, x) => sum + x, 0) / squares.length);
  return { prediction: { ...prediction, structure: { ...structure, position } }, rmsd };
}

// The rigid motion of points onto others with the least squares of distances (Horn 1987, quaternions).
function superposition(from, to) {
  const middle = (points) => [0, 1, 2].map((axis) => points.reduce((sum, point) => sum + point[axis], 0) / points.length);
  const [here, there] = [middle(from), middle(to)];
  const product = (a, b) => from.reduce((sum, point, i) => sum + (point[a] - here[a]) * (to[i][b] - there[b]), 0);
  const [[xx, xy, xz], [yx, yy, yz], [zx, zy, zz]] = [0, 1, 2].map((a) => [0, 1, 2].map((b) => product(a, b)));
  const [w, x, y, z] = largestEigenvector([
    [xx + yy + zz, yz - zy, zx - xz, xy - yx],
    [yz - zy, xx - yy - zz, xy + yx, zx + xz],
    [zx - xz, xy + yx, yy - xx - zz, yz + zy],
    [xy - yx, zx + xz, yz + zy, zz - xx - yy],
  ]);
  const rotation = [
    [w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)],
    [2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)],
    [2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z],
  ];
  return (point) => rotation.map((row, axis) => there[axis] + row.reduce((sum, value, b) => sum + value * (point[b] - here[b]), 0));
}

// Jacobi's rotations of a symmetric matrix.
function largestEigenvector(matrix) {
  const size = matrix.length;
  const values = matrix.map((row) => [...row]);
  const vectors = values.map((_, i) => values.map((_, j) => Number(i === j)));
  for (let sweep = 0; sweep < 50; sweep++) {
    for (let p = 0; p < size; p++) {
      for (let q = p + 1; q < size; q++) {
        if (Math.abs(values[p][q]) < 1e-12 * Math.abs(values[p][p] + values[q][q]) || values[p][q] === 0) continue;
        const angle = 0.5 * Math.atan2(2 * values[p][q], values[q][q] - values[p][p]);
        const [c, s] = [Math.cos(angle), Math.sin(angle)];
        const turn = (row) => [row[p], row[q]] = [c * row[p] - s * row[q], s * row[p] + c * row[q]];
        values.forEach(turn);
        [values[p], values[q]] = [values[p].map((x, i) => c * x - s * values[q][i]), values[q].map((x, i) => s * values[p][i] + c * x)];
        vectors.forEach(turn);
      }
    }
  }
  const best = values.reduce((most, row, i) => (row[i] > values[most][most] ? i : most), 0);
  return vectors.map((row) => row[best]);
}
