// The check of the backbone: figures, problems, and the Ramachandran plot over the regions of general residues.

const OF_GEOMETRY = meta.scores.filter(({ covers }) => covers === 'geometry').map(({ name }) => name);
const REGION_COLOURS = ['var(--ink)', 'var(--fair)', 'var(--poor)'];
const PLOT = { size: 300, left: 34, bottom: 30 };

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
  plot.append(svg('path', { d: regionPath(1), fill: 'var(--strand)', opacity: '0.16' }), svg('path', { d: regionPath(0), fill: 'var(--strand)', opacity: '0.30' }));
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
  byId('geometry').hidden = !geometry;
  if (!geometry) return;
  const outliers = chains.flatMap((chain) => [...chain.sequence].map((letter, place) => [chain.start + place, `${chains.length > 1 ? `${chain.name} ` : ''}${letter}${chain.labels[place]}`]))
    .filter(([residue]) => geometry.regions[residue] === 2).map(([, name]) => name);
  const table = make('table');
  for (const name of OF_GEOMETRY.filter((one) => geometry.figures[one] !== undefined)) {
    table.append(make('tr', undefined, { title: explanationOf(name) }, make('td', labelOf(name)), make('td', scoreText(name, geometry.figures[name]))));
  }
  const listed = outliers.length ? `Outliers: ${outliers.slice(0, 12).join(', ')}${outliers.length > 12 ? ' and others' : ''}. ` : '';
  const words = geometry.problems.length ? `Not the geometry of a protein: ${geometry.problems.join('; ')}. ` : '';
  panel('geometry', 'Backbone check', make('div', undefined, { class: 'body plot' }, ramachandranPlot(geometry, chains), table),
    make('p', `${words}${listed}As predicted, before relaxation.`, { class: 'foot' }));
}
