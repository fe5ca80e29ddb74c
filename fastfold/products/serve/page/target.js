// The form: what its text holds, and the submissions that it makes.

const MOST_JOBS = 100; // of one text

// Records of a FASTA text with their numbers of letters; a text without a header is one record.
function records(text) {
  const parts = text.startsWith('>') ? text.split(/^(?=>)/m) : text ? [text] : [];
  return parts.map((part) => ({ text: part, letters: part.replace(/^>.*$/m, '').replace(/[\s:]/g, '').length }));
}

const isAlignment = (text) => /^(?!>).*-/m.test(text);

// The text in words, before it is submitted.
function described(text, format, isComplex) {
  const found = records(text);
  if (!found.length) return '';
  if (format === 'a3m') return `an alignment of ${counted(found.length, 'row')}, ${counted(found[0].letters, 'residue')}; one job`;
  const letters = found.reduce((sum, one) => sum + one.letters, 0);
  const jobs = isComplex ? 'one job' : found.length === 1 ? 'one job' : `${found.length} jobs, one each`;
  const chains = !text.startsWith('>') && text.includes(':') ? ` in ${text.split(':').length} chains` : '';
  return `${counted(found.length, text.startsWith('>') ? 'record' : 'sequence')}, ${counted(letters, 'residue')}${chains}; ${jobs}`;
}

// Bodies of the jobs of a text; an Error says what is missing.
function bodies(text, format, isComplex, name, common) {
  if (!text) throw new Error('Paste a sequence, a FASTA file or an alignment first.');
  if (format === 'a3m') return [{ ...common, a3m: `${text}\n`, name }];
  const found = records(text);
  if (!text.startsWith('>')) return [{ ...common, sequence: text.replace(/\s+/g, ''), name }];
  if (isComplex) return [{ ...common, fasta: `${text}\n`, complex: true, name }];
  if (found.length > MOST_JOBS) throw new Error(`The text has ${found.length} records; submit at most ${MOST_JOBS} at once.`);
  if (found.length > 1 && name) throw new Error('Each of several records has its name from its header; leave Name empty.');
  return found.map((one) => ({ ...common, fasta: one.text, name }));
}

function settings() {
  const number = (id) => (byId(id).value === '' ? null : Number(byId(id).value));
  const chosen = { num_recycles: number('recycles'), num_models: number('models'), relax: byId('relax').value };
  chosen.seeds = Array.from({ length: number('seeds') }, (_, seed) => seed);
  const given = Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== null));
  return { settings: given, priority: number('priority') };
}
