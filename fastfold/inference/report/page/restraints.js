// Restraints of the chosen prediction: limits, distances, and which ones contradict each other.

function limitsOf({ min, max, atoms }) {
  const between = { CB: ' of CB', any: ' of any atoms' }[atoms] || '';
  if (max === null || max === undefined) return `from ${shown(min, 1)} Å${between}`;
  return (min ? `${shown(min, 1)} to ${shown(max, 1)} Å` : `to ${shown(max, 1)} Å`) + between;
}

function drawRestraints(prediction) {
  const found = prediction.restraints;
  const place = byId('restraints');
  if (!found) {
    place.replaceChildren();
    return;
  }
  const head = ['restraint', 'residues', 'limits', 'before', 'distance', 'holds', 'group'];
  if (found.leave_one_out) head.push('contradicts', 'pLDDT without it');
  const rows = found.restraints.map((one) => {
    const nearest = one.residues.map((number) => residueName(prediction, number - 1)).join(' – ');
    const residues = one.pairs > 1 ? `${nearest}, nearest of ${one.pairs} pairs` : nearest;
    const cells = [one.line, residues, limitsOf(one), shown(one.distance_before, 1), shown(one.distance, 1), one.holds ? 'yes' : 'no', one.group];
    if (found.leave_one_out) {
      const gain = one.plddt_gain_without;
      cells.push((one.contradicts || []).join(', '), gain === undefined ? '–' : `${gain > 0 ? '+' : ''}${gain.toFixed(1)}`);
    }
    return cells;
  });
  drawTable('restraints', 'Restraints', head, rows);
  const paid = found.confidence_paid;
  const facts = [`${found.satisfied} of ${found.total} hold, ${found.satisfied_before} before`, `${found.steps} steps`];
  facts.push(paid > 0 ? `confidence paid: ${paid.toFixed(1)} pLDDT` : `no confidence paid: pLDDT rose by ${(-paid).toFixed(1)}`);
  place.append(make('p', facts.join(' · ')));
}
