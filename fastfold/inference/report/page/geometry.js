// The check of the backbone: figures, problems, and the Ramachandran plot over the regions of general residues.

const GEOMETRY = [
  ['ramachandran_favoured', 'Ramachandran favoured', 'share', 'Experiments: 96%. The regions hold 98% of the residues of good experimental structures.'],
  ['ramachandran_outliers', 'Ramachandran outliers', 'share', 'Experiments: 0.6%.'],
  ['twisted_peptides', 'twisted peptide bonds', 'count', 'Omega more than 30° from 0° and 180°.'],
  ['cis_peptides', 'cis peptide bonds', 'count', 'Before residues other than proline.'],
  ['bond_outliers', 'unusual bond lengths', 'count', 'More than 4 standard deviations from Engh and Huber\u2019s.'],
  ['angle_outliers', 'unusual bond angles', 'count', 'More than 4 standard deviations from Engh and Huber\u2019s.'],
  ['wrong_hands', 'mirrored carbons', 'count', 'CA, and CB of threonine and isoleucine.'],
  ['overlaps', 'overlapping pairs of atoms', 'count', 'Radii overlap by more than 1.5 Å.'],
  ['pierced_rings', 'pierced rings', 'count', 'A bond passes through a side chain\u2019s ring.'],
];
const REGION_COLOURS = ['#2166ac', '#b8860b', '#b2182b'];
const PLOT = { size: 300, left: 34, bottom: 30 };

function svg(tag, attributes, text) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// One path of all cells of a region; a column of the map has one phi.
function regionPath(region) {
  const cell = PLOT.size / meta.ramachandran.length;
  const path = [];
  meta.ramachandran.forEach((column, i) => {
    for (let from = 0; from < column.length;) {
      let to = from;
      while (to < column.length && column[to] === String(region)) to++;
      if (to > from) path.push(`M${(PLOT.left + i * cell).toFixed(1)} ${(PLOT.size - to * cell).toFixed(1)}h${cell.toFixed(2)}v${((to - from) * cell).toFixed(1)}h${(-cell).toFixed(2)}z`);
      from = Math.max(to, from + 1);
    }
  });
  return path.join('');
}

function ramachandranPlot({ phi, psi, regions }, chains) {
  const plot = svg('svg', { viewBox: `0 0 ${PLOT.left + PLOT.size + 4} ${PLOT.size + PLOT.bottom}`, role: 'img', 'aria-label': 'Ramachandran plot' });
  plot.append(svg('path', { d: regionPath(1), fill: '#2166ac', opacity: '0.10' }), svg('path', { d: regionPath(0), fill: '#2166ac', opacity: '0.28' }));
  plot.append(svg('rect', { x: PLOT.left, y: 0, width: PLOT.size, height: PLOT.size, fill: 'none', stroke: 'var(--line)' }));
  const at = (angle) => (angle + 180) / 360 * PLOT.size;
  for (const tick of [-180, -90, 0, 90, 180]) {
    plot.append(svg('text', { x: PLOT.left + at(tick), y: PLOT.size + 13, 'text-anchor': tick === 180 ? 'end' : 'middle' }, String(tick)));
    plot.append(svg('text', { x: PLOT.left - 4, y: PLOT.size - at(tick) + (tick === 180 ? 10 : 4), 'text-anchor': 'end' }, String(tick)));
  }
  plot.append(svg('text', { x: PLOT.left + PLOT.size / 2, y: PLOT.size + 26, 'text-anchor': 'middle' }, 'phi (°)'));
  plot.append(svg('text', { x: 10, y: PLOT.size / 2, 'text-anchor': 'middle', transform: `rotate(-90 10 ${PLOT.size / 2})` }, 'psi (°)'));
  for (const chain of chains) {
    for (let place = 0; place < chain.length; place++) {
      const residue = chain.start + place;
      if (regions[residue] < 0) continue;
      const point = svg('circle', { cx: (PLOT.left + at(phi[residue])).toFixed(1), cy: (PLOT.size - at(psi[residue])).toFixed(1), r: regions[residue] === 2 ? 3 : 2, fill: REGION_COLOURS[regions[residue]] });
      point.append(svg('title', {}, `${chain.sequence[place]} ${chain.labels[place]} of ${chain.name}: ${shown(phi[residue], 0)}°, ${shown(psi[residue], 0)}°`));
      plot.append(point);
    }
  }
  return plot;
}

function drawGeometry({ geometry, chains }) {
  const place = byId('geometry');
  place.hidden = !geometry;
  if (!geometry) return;
  const words = geometry.problems.length ? `Not the geometry of a protein: ${geometry.problems.join('; ')}.` : 'The geometry is that of a protein.';
  const table = make('table');
  for (const [key, label, kind, meaning] of GEOMETRY) {
    const value = geometry.figures[key];
    if (value === undefined) continue;
    const row = make('tr', undefined, { title: meaning });
    row.append(make('td', label), make('td', kind === 'share' ? `${(100 * value).toFixed(1)}%` : String(value)));
    table.append(row);
  }
  const pictures = make('div');
  pictures.append(ramachandranPlot(geometry, chains), table);
  place.replaceChildren(make('h3', 'Backbone check'), make('p', `${words} As predicted, before relaxation.`), pictures);
}
