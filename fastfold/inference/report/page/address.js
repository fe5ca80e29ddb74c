// The chosen prediction in the page's address: #target/model.

const addressOfRow = (row) => `#${encodeURIComponent(row.target)}/${encodeURIComponent([row.model, 'seed', row.seed, ...(row.sample ? [row.sample] : [])].join('_'))}`;

// The row of an address: of its target and model, or the best of its target; undefined for another address.
function rowOfAddress(address) {
  const target = address.split('/')[0];
  return meta.rows.find((row) => addressOfRow(row) === address) || meta.rows.find((row) => addressOfRow(row).split('/')[0] === target);
}

// Choose a row by a person's hand, so that the address follows.
function visit(row) {
  try {
    history.replaceState(null, '', addressOfRow(row));
  } catch {
    // A page without an address of its own, such as a frame of a notebook.
  }
  return choose(row);
}

window.addEventListener('hashchange', () => {
  const row = rowOfAddress(location.hash);
  if (row) choose(row);
});
