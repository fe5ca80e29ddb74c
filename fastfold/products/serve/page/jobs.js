// Rows of the user's jobs. A row is made again only if its job has changed, so that its buttons keep the focus.

const TONES = { done: 'good', failed: 'poor', running: 'fair' };

function wordsOf(job) {
  if (job.state === 'queued') return job.position ? `${counted(job.position, 'job')} before it` : 'next';
  if (job.state === 'running') return job.progress || 'started';
  return job.text;
}

function rowOf(job, remove) {
  const acts = make('td', undefined, { class: 'acts' });
  if (job.page) acts.append(make('a', 'results', { class: 'button first', href: job.page, target: '_blank', rel: 'noopener', 'aria-label': `results of ${job.name}` }));
  if (job.state !== 'running') {
    const verb = job.state === 'queued' ? 'cancel' : 'remove';
    const button = make('button', verb, { type: 'button', 'aria-label': `${verb} ${job.name}` });
    // The second press removes, so that a slip does not.
    button.addEventListener('click', () => {
      if (button.dataset.asked) remove(job);
      button.dataset.asked = 'yes';
      button.textContent = `${verb}?`;
    });
    acts.append(button);
  }
  const row = make('tr', undefined, { 'data-job': job.id, 'data-state': job.state });
  row.append(
    make('td', job.name, { class: 'text', title: job.name }),
    make('td', job.residues.toLocaleString('en')),
    make('td', undefined, { class: 'text' }, make('span', job.state, { class: `pill ${TONES[job.state] || ''}` })),
    make('td', wordsOf(job), { class: 'text wide' }),
    make('td', new Date(job.submitted * 1000).toLocaleString('sv').slice(0, 16), { class: 'text' }),
    acts,
  );
  return row;
}

const shownRows = new Map(); // by the id of the job: its description as text, and its row

function showJobs(jobs, remove) {
  const body = document.querySelector('#jobs tbody');
  const rows = jobs.toReversed().map((job) => {
    const text = JSON.stringify(job);
    if (shownRows.get(job.id)?.text !== text) shownRows.set(job.id, { text, row: rowOf(job, remove) });
    return shownRows.get(job.id).row;
  });
  if (rows.length !== body.children.length || rows.some((row, k) => row !== body.children[k])) body.replaceChildren(...rows);
  byId('jobs-count').textContent = jobs.length ? counted(jobs.length, 'job') : 'none yet';
}
