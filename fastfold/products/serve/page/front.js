// Requests of the page, and its state: signed out, or with the jobs of a user.

const POLL_MS = 1500;
const KEPT = 'fastfold-token';
const needsToken = document.body.dataset.tokens === 'yes';
let secret = sessionStorage.getItem(KEPT) || '';
const keys = new Map(); // Idempotency-Key by body, so that a repeated submission is one job

class SignedOut extends Error {}

async function ask(path, { method = 'GET', body, key } = {}) {
  const headers = {};
  if (secret) headers.Authorization = `Bearer ${secret}`;
  if (body) headers['Content-Type'] = 'application/json';
  if (key) headers['Idempotency-Key'] = key;
  let answer;
  try {
    answer = await fetch(path, { method, headers, body, cache: 'no-store', credentials: 'omit' });
  } catch {
    throw new Error('The server cannot be reached; the page tries again.');
  }
  if (answer.status === 401) throw new SignedOut('This token is unknown.');
  if (answer.status === 204) return null;
  // A proxy in front of the server answers by pages of its own.
  const found = await answer.json().catch(() => ({ error: `The server cannot be reached (status ${answer.status}); the page tries again.` }));
  if (found.error) throw new Error(found.error);
  return found;
}

function say(id, text, isProblem = false) {
  byId(id).textContent = text;
  byId(id).classList.toggle('poor', isProblem);
}

function problem(text) {
  byId('problem').textContent = text;
  byId('problem').hidden = !text;
}

function leave(text = '') {
  secret = '';
  sessionStorage.removeItem(KEPT);
  shownRows.clear();
  document.querySelector('#jobs tbody').replaceChildren();
  byId('facts').textContent = '';
  byId('work').hidden = byId('leave').hidden = true;
  byId('entry').hidden = false;
  byId('token').value = '';
  byId('token').focus();
  problem(text);
}

// Asks for the state of the server and the jobs, and shows both.
async function refresh() {
  const asked = secret;
  try {
    const server = await ask('/v1/server');
    if (secret !== asked) return; // signed out meanwhile
    const jobs = await ask('/v1/jobs');
    if (secret !== asked) return;
    const facts = [`${server.queued} waiting, ${server.running} running`, counted(server.workers, 'worker')];
    if (server.max_residues) facts.push(`up to ${counted(server.max_residues, 'residue')}`);
    if (needsToken) facts.unshift(server.user);
    byId('facts').textContent = facts.join(' · ');
    problem(server.problem ? `Nothing is folded at present: ${server.problem}` : '');
    showJobs(jobs, remove);
    byId('work').hidden = false;
    byId('leave').hidden = !needsToken;
    byId('entry').hidden = true;
  } catch (error) {
    if (secret !== asked) return;
    if (error instanceof SignedOut) leave(error.message);
    else problem(error.message);
  }
}

async function remove(job) {
  try {
    await ask(`/v1/jobs/${job.id}`, { method: 'DELETE' });
  } catch (error) {
    problem(error.message);
  }
  await refresh();
}

// Submits the jobs of the form, one after the other; those that are refused stay in the text.
async function submit() {
  const text = byId('text').value.trim();
  const isAligned = byId('format').value === 'a3m';
  let done = 0;
  let left = [];
  byId('fold').disabled = true;
  try {
    left = bodies(text, byId('format').value, byId('complex').checked, byId('name').value.trim(), settings());
    while (left.length) {
      const body = JSON.stringify(left[0]);
      if (!keys.has(body)) keys.set(body, [...crypto.getRandomValues(new Uint8Array(16))].map((x) => x.toString(16).padStart(2, '0')).join(''));
      await ask('/v1/jobs', { method: 'POST', body, key: keys.get(body) });
      keys.delete(body);
      left.shift();
      done += 1;
    }
    byId('text').value = byId('name').value = byId('file').value = '';
    say('said', '');
    say('answer', `${counted(done, 'job')} submitted`);
  } catch (error) {
    if (error instanceof SignedOut) return leave(error.message);
    if (done && !isAligned) byId('text').value = left.map((one) => one.fasta).join('');
    say('answer', done ? `${counted(done, 'job')} submitted, then: ${error.message}` : error.message, true);
  } finally {
    byId('fold').disabled = false;
  }
  await refresh();
}

function describe() {
  say('said', described(byId('text').value.trim(), byId('format').value, byId('complex').checked));
  say('answer', '');
}

function changed() {
  const text = byId('text').value.trim();
  byId('format').value = isAlignment(text) ? 'a3m' : 'fasta';
  describe();
}

byId('text').addEventListener('input', changed);
byId('format').addEventListener('change', describe);
byId('complex').addEventListener('change', describe);
byId('file').addEventListener('change', async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  byId('text').value = await file.text();
  changed();
  if (file.name.endsWith('.a3m')) byId('format').value = 'a3m';
  describe();
});
byId('target').addEventListener('submit', (event) => {
  event.preventDefault();
  submit();
});
byId('entry').addEventListener('submit', (event) => {
  event.preventDefault();
  secret = byId('token').value.trim();
  sessionStorage.setItem(KEPT, secret);
  refresh();
});
byId('leave').addEventListener('click', () => leave());

offerTheme(() => {});
if (needsToken && !secret) leave();
else refresh();
setInterval(() => {
  if ((secret || !needsToken) && !document.hidden) refresh();
}, POLL_MS);
