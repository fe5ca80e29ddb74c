// Elements, numbers as text, and colours of the theme.

const byId = (id) => document.getElementById(id);

function make(tag, text, attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function svg(tag, attributes, text) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function shown(value, digits) {
  if (value === undefined || value === null) return '–';
  if (typeof value !== 'number') return String(value);
  return digits ? value.toFixed(digits) : Number.isInteger(value) ? String(value) : value.toFixed(0);
}

// A difference with its sign; without one where it is rounded to zero.
function signed(value, digits) {
  if (typeof value !== 'number') return '–';
  const text = value.toFixed(digits);
  return Number(text) > 0 ? `+${text}` : Number(text) === 0 ? text.replace('-', '') : text;
}

const counted = (number, noun) => `${number.toLocaleString('en')} ${noun}${number === 1 ? '' : 's'}`;

// The theme is the system's until the button sets the condition of the rule with the dark tokens.
const darkTheme = [...document.styleSheets[0].cssRules].find((rule) => rule.media && rule.media.mediaText.includes('prefers-color-scheme')).media;
const systemTheme = window.matchMedia(darkTheme.mediaText);
const isDark = () => darkTheme.mediaText === 'screen' || (darkTheme.mediaText !== 'not all' && systemTheme.matches);

function offerTheme(changed) {
  const button = byId('theme');
  const tell = () => {
    button.textContent = isDark() ? 'light theme' : 'dark theme';
    changed();
  };
  button.addEventListener('click', () => {
    const dark = !isDark();
    darkTheme.mediaText = dark ? 'screen' : 'not all';
    document.documentElement.style.colorScheme = dark ? 'dark' : 'light';
    tell();
  });
  systemTheme.addEventListener('change', tell);
  window.matchMedia('print').addEventListener('change', changed); // paper is light
  tell();
}

// A colour of the theme, for canvases and the viewer.
const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const sizeOf = (canvas) => [canvas.clientWidth || 600, canvas.clientHeight || 200];

// A canvas in the pixels of the screen; returns its context and its size in CSS pixels.
function fit(canvas, [width, height] = sizeOf(canvas)) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${token('family')}`;
  context.fillStyle = token('soft');
  context.strokeStyle = token('edge');
  return { context, width, height };
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function upright(context, text, x, y) {
  context.save();
  context.translate(x, y);
  context.rotate(-Math.PI / 2);
  context.textAlign = 'center';
  context.fillText(text, 0, 0);
  context.restore();
}

const rgb = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

function mix(from, to, share) {
  const [a, b] = [rgb(from), rgb(to)];
  return `rgb(${a.map((x, k) => Math.round(x + share * (b[k] - x))).join(' ')})`;
}

// A colour scale in words: its ends around a gradient.
function ramp(id, low, high, colours) {
  byId(id).replaceChildren(low, make('i', undefined, { style: `background: linear-gradient(90deg, ${colours.join(', ')})` }), high);
}

function legendOf(entries) {
  return entries.map(([colour, text]) => make('span', undefined, {}, make('i', undefined, { style: `background: ${colour}` }), text));
}

function panel(id, title, ...content) {
  byId(id).hidden = content.length === 0;
  byId(id).replaceChildren(make('header', undefined, {}, make('h2', title)), ...content);
}

function tableOf(head, rows) {
  const table = make('table');
  table.append(make('tr', undefined, {}, ...head.map((label) => make('th', label, { scope: 'col' }))));
  for (const cells of rows) {
    table.append(make('tr', undefined, {}, ...cells.map((cell) => (cell instanceof Node ? make('td', undefined, {}, cell) : make('td', cell)))));
  }
  return table;
}

const scrolled = (label, ...content) => make('div', undefined, { class: 'body scroll', tabindex: '0', role: 'region', 'aria-label': label }, ...content);
