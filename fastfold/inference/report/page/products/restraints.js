// Restraints of the chosen prediction: limits, distances, and which ones contradict each other.

function limitsOf({ min, max, atoms }) {
  const between = { CB: ' of CB', any: ' of any atoms' }[atoms] || '';
  if (max === null || max === undefined) return `from ${shown(min, 1)} Å${between}`;
  return (min ? `${shown(min, 1)} to ${shown(max, 1)} Å` : `to ${shown(max, 1)} Å`) + between;
}

function drawRestraints(prediction) {
  const found = prediction.restraints;
  byId('restraints').hidden = !found;
  if (!found) return;
  const head = ['restraint', 'residues', 'limits', 'before', 'distance', 'result', 'group'];
  if (found.leave_one_out) head.push('contradicts', 'pLDDT without it');
  const ordered = [...found.restraints].sort((a, b) => Number(a.holds) - Number(b.holds));
  const rows = ordered.map((one) => {
    const nearest = one.residues.map((number) => residueName(prediction, number - 1)).join(' – ');
    const residues = one.pairs > 1 ? `${nearest}, nearest of ${one.pairs} pairs` : nearest;
    const result = make('span', one.holds ? 'satisfied' : 'violated', { class: `pill ${one.holds ? 'good' : 'poor'}` });
    const cells = [one.line, residues, limitsOf(one), shown(one.distance_before, 1), shown(one.distance, 1), result, one.group];
    if (found.leave_one_out) cells.push((one.contradicts || []).join(', '), signed(one.plddt_gain_without, 1));
    return cells;
  });
  const table = scrolled('restraints', tableOf(head, rows));
  table.classList.add('plain');
  const violated = found.total - found.satisfied;
  const facts = [`${found.satisfied} of ${found.total} satisfied, ${found.satisfied_before} before`, `${violated} violated`, counted(found.steps, 'step')];
  const paid = found.confidence_paid;
  facts.push(paid > 0 ? `confidence paid: ${paid.toFixed(1)} pLDDT` : `no confidence paid: pLDDT rose by ${(-paid).toFixed(1)}`);
  panel('restraints', 'Restraints', table, make('p', facts.join(' · '), { class: 'foot' }));
  byId('restraints').querySelector('header').append(make('span', `${found.satisfied} of ${found.total} satisfied`, { class: `pill ${violated ? 'fair' : 'good'}` }));
}
