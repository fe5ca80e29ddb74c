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
  const head = ['restraint', 'residues', 'limits', 'before', 'distance', 'result', 'group', 'probability', 'usual'];
  const trials = found.leave_one_out;
  if (trials) head.push('contradicts', 'distance without it', 'pLDDT without it');
  const ordered = [...found.restraints].sort((a, b) => Number(a.holds) - Number(b.holds));
  const rows = ordered.map((one) => {
    const nearest = one.residues.map((number) => residueName(prediction, number - 1)).join(' – ');
    const residues = one.pairs > 1 ? `${nearest}, nearest of ${one.pairs} pairs` : nearest;
    const result = make('span', one.holds ? 'satisfied' : 'violated', { class: `pill ${one.holds ? 'good' : 'poor'}` });
    const cells = [one.line, residues, limitsOf(one), shown(one.distance_before, 1), shown(one.distance, 1), result, one.group];
    cells.push(shown(one.probability, 3), shown(one.usual_probability, 3));
    if (trials) cells.push((one.contradicts || []).join(', '), shown(one.distance_without, 1), signed(one.plddt_gain_without, 1));
    return cells;
  });
  const table = scrolled('restraints', tableOf(head, rows));
  table.classList.add('plain');
  const violated = found.total - found.satisfied;
  const facts = [`${found.satisfied} of ${found.total} satisfied, ${found.satisfied_before} before`, `${violated} violated`];
  if (found.steps) facts.push(counted(found.steps, 'step'));
  const paid = found.confidence_paid;
  if (typeof paid === 'number') facts.push(paid > 0 ? `confidence paid: ${paid.toFixed(1)} pLDDT` : `no confidence paid: pLDDT rose by ${(-paid).toFixed(1)}`);
  if (typeof found.satisfied_left_out === 'number') facts.push(`${found.satisfied_left_out} hold when left out`);
  if (typeof found.evidence === 'number') facts.push(`evidence ${found.evidence.toFixed(2)}${found.doubtful ? ': the network\'s distances speak against them' : ''}`);
  panel('restraints', 'Restraints', table, make('p', facts.join(' · '), { class: 'foot' }));
  byId('restraints').querySelector('header').append(make('span', `${found.satisfied} of ${found.total} satisfied`, { class: `pill ${violated ? 'fair' : 'good'}` }));
}
