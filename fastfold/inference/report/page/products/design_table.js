// Sequences of the listed designs as FASTA with scores, and the table of trajectories and filters.

const FASTA_SCORES = ['loss', 'mean_plddt', 'ptm', 'iptm', 'rmsd'];

// One record a design, the best fold's scores in its header.
function designFasta(rows) {
  const seen = new Set();
  return rows.filter((row) => row.sequence && !seen.has(row.target) && seen.add(row.target)).map((row) => {
    const facts = FASTA_SCORES.filter((key) => typeof row[key] === 'number').map((key) => `${key}=${Number(row[key].toPrecision(4))}`);
    if (row.filters) facts.push(`filters=${row.filters.replace(/ /g, '_')}`);
    return `>${[row.name, ...facts].join(' ')}\n${row.sequence}\n`;
  }).join('');
}

function arrangeDesigns() {
  const note = (text) => { byId('fasta-note').textContent = text; };
  byId('fasta-copy').addEventListener('click', async () => {
    const text = designFasta(kept);
    try {
      await navigator.clipboard.writeText(text);
      note(`copied ${counted((text.match(/^>/gm) || []).length, 'sequence')}`);
    } catch (error) {
      note('the browser refused to copy; save the FASTA');
    }
  });
  byId('fasta-save').addEventListener('click', () => {
    const address = URL.createObjectURL(new Blob([designFasta(kept)], { type: 'text/plain' }));
    make('a', '', { href: address, download: 'designs_with_scores.fasta' }).click();
    URL.revokeObjectURL(address);
  });
  byId('statistics').hidden = !meta.statistics.length;
  const cells = (names, tag) => names.map((text) => make(tag, text));
  const line = (tag, names) => { const row = make('tr'); row.append(...cells(names, tag)); return row; };
  byId('statistics').querySelector('thead').replaceChildren(line('th', ['kind', 'name', 'count', 'of', 'share']));
  byId('statistics').querySelector('tbody').replaceChildren(...meta.statistics.map(({ kind: what, name, count, of: total }) =>
    line('td', [what, name, String(count), String(total), total ? `${Math.round((100 * count) / total)}%` : ''])));
}
