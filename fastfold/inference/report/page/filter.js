// Which rows are listed: words, conditions on scores, the best of each target.

// Conditions such as "ipsae>0.5 rank=1", all of which a row has to meet; null where the text is none.
function conditions() {
  const text = byId('where').value.trim();
  const tests = { '>': (a, b) => a > b, '>=': (a, b) => a >= b, '<': (a, b) => a < b, '<=': (a, b) => a <= b, '=': (a, b) => a === b };
  const found = [];
  const left = text.replace(/([a-z_0-9]+)\s*(>=|<=|==?|>|<)\s*(-?\d+(?:\.\d+)?)/gi, (all, key, sign, number) => {
    found.push([key.toLowerCase(), tests[sign === '==' ? '=' : sign], Number(number)]);
    return '';
  }).replace(/\b(and)\b|[\s,;&]/gi, '');
  const unknown = found.map(([key]) => key).find((key) => !meta.rows.some((row) => typeof row[key] === 'number'));
  const wrong = left ? 'expected ipsae>0.5, for example' : unknown ? `no score ${unknown}` : '';
  byId('where').setAttribute('aria-invalid', String(Boolean(wrong)));
  byId('where-note').textContent = wrong;
  return wrong ? null : found;
}

const wordsOf = (id) => byId(id).value.toLowerCase().split(/\s+/).filter(Boolean);

function hasWords(row, words) {
  const text = `${row.target} ${row.name} ${row.model} ${row.partner_1 || ''} ${row.partner_2 || ''} ${row.mutation || ''}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function filteredRows() {
  const words = wordsOf('find');
  const isBestOnly = byId('best').checked;
  const limits = conditions() || [];
  return meta.rows.filter((row) => (!isBestOnly || (row.rank || 1) === 1) && hasWords(row, words) &&
    limits.every(([key, test, number]) => typeof row[key] === 'number' && test(row[key], number)));
}

// Rows by a column: numbers by their size, text from A, missing ones last.
function sortedRows(rows, key, isDown) {
  const missing = (x) => x === undefined || x === null;
  return [...rows].sort((one, other) => {
    const [a, b] = [one[key], other[key]];
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return (isDown ? -1 : 1) * (typeof a === 'number' ? a - b : byName(a, b));
  });
}
