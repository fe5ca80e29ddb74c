// Curves of a run over its steps: values under the pointer, curves to hide, a logarithmic axis to switch.

const { charts, marks } = JSON.parse(document.getElementById('data').textContent);
const COLOURS = ['#2b7bba', '#d9822b', '#3f9b57', '#c0504d', '#8d6bb8', '#8c6d4f', '#c76aa5', '#7d8894', '#a5a436', '#2aa0a4', '#5b6abf'];
const EDGE = { left: 62, top: 10, right: 12, bottom: 36 };
const HIGH = 260;
const FEW = 60; // points up to which a curve has dots

function make(tag, attributes = {}, ...children) {
  const isShape = ['svg', 'path', 'line', 'text', 'circle'].includes(tag);
  const element = isShape ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Round numbers of a range: 1, 2 or 5 times a power of ten, never below `least` apart.
function ticks(low, high, most, least) {
  const power = 10 ** Math.floor(Math.log10(Math.max((high - low) / most, least, 1e-300)));
  const step = Math.max(least, [1, 2, 5, 10].map((k) => k * power).find((one) => (high - low) / one <= most) || 10 * power);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, k) => (first + k) * step);
}

const text = (value) => (value === 0 ? '0' : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4))));

class Chart {
  constructor(spec) {
    this.curves = spec.curves.map((curve, k) => ({ ...curve, colour: COLOURS[k % COLOURS.length], isShown: true }));
    this.canLog = this.curves.every(({ values }) => values.every((value) => value >= 0) && values.some((value) => value > 0));
    this.isLog = spec.logarithmic && this.canLog;
    this.steps = [...new Set(this.curves.flatMap(({ steps }) => steps))].sort((a, b) => a - b);
    this.at = null;
    this.label = spec.label;
    this.picture = make('svg', { role: 'img', tabindex: '0', 'aria-label': `${spec.title} over the steps; arrow keys move` });
    this.says = make('output');
    const keys = this.curves.map((curve) => this.box(make('i', { style: `background: ${curve.colour}` }), curve.name, curve.isShown, (isOn) => { curve.isShown = isOn; }));
    const log = this.canLog ? [this.box('', 'logarithmic', this.isLog, (isOn) => { this.isLog = isOn; })] : [];
    document.getElementById('charts').append(make('section', {}, make('h2', {}, spec.title), make('div', { class: 'bar' }, ...(keys.length > 1 ? keys : []), ...log), this.picture, this.says));
    this.picture.addEventListener('pointermove', (event) => this.point(this.nearest(event.clientX - this.picture.getBoundingClientRect().left)));
    this.picture.addEventListener('pointerleave', () => this.point(null));
    this.picture.addEventListener('keydown', (event) => {
      const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!turn) return;
      event.preventDefault();
      this.point(Math.max(0, Math.min(this.steps.length - 1, (this.at ?? -1) + turn)));
    });
  }

  box(mark, name, isOn, change) {
    const input = make('input', { type: 'checkbox' });
    input.checked = isOn;
    input.addEventListener('change', () => {
      change(input.checked);
      this.draw();
    });
    return make('label', {}, input, mark, name);
  }

  nearest(pixel) {
    const step = this.low + (pixel - EDGE.left) / (this.wide - EDGE.left - EDGE.right) * (this.high - this.low);
    return this.steps.reduce((best, one, k) => (Math.abs(one - step) < Math.abs(this.steps[best] - step) ? k : best), 0);
  }

  point(at) {
    this.at = at;
    const step = this.steps[at];
    const values = this.curves.filter(({ isShown }) => isShown).map(({ name, steps, values: own }) => [name, own[steps.indexOf(step)]]).filter(([, value]) => value !== undefined);
    this.says.textContent = at === null ? '' : `step ${step.toLocaleString('en')}: ${values.map(([name, value]) => `${name} ${text(value)}`).join(', ')}`;
    this.draw();
  }

  draw() {
    const { picture } = this;
    this.wide = picture.clientWidth || 460;
    // A logarithm leaves out zeros.
    const places = ({ values: own }) => [...own.keys()].filter((k) => !this.isLog || own[k] > 0);
    const shown = this.curves.filter(({ isShown }) => isShown);
    const values = shown.flatMap((curve) => places(curve).map((k) => curve.values[k]));
    [this.low, this.high] = [this.steps[0], Math.max(this.steps[this.steps.length - 1], this.steps[0] + 1)];
    const scale = (value) => (this.isLog ? Math.log10(value) : value);
    let [bottom, top] = values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [this.isLog ? 1 : 0, 10];
    if (bottom === top) [bottom, top] = this.isLog ? [bottom / 2, top * 2] : [bottom - Math.abs(bottom || 1) / 2, top + Math.abs(top || 1) / 2];
    const x = (step) => EDGE.left + (step - this.low) / (this.high - this.low) * (this.wide - EDGE.left - EDGE.right);
    const y = (value) => HIGH - EDGE.bottom - (scale(value) - scale(bottom)) / (scale(top) - scale(bottom)) * (HIGH - EDGE.top - EDGE.bottom);
    picture.setAttribute('viewBox', `0 0 ${this.wide} ${HIGH}`);
    const rule = (x0, y0, x1, y1, more = {}) => make('line', { x1: x0, y1: y0, x2: x1, y2: y1, stroke: 'var(--line)', ...more });
    const decades = this.isLog && top / bottom >= 100 ? ticks(Math.log10(bottom), Math.log10(top), 6, 1).map((power) => 10 ** power) : null;
    const parts = [];
    for (const value of decades || ticks(bottom, top, 6, 0)) {
      parts.push(rule(EDGE.left, y(value), this.wide - EDGE.right, y(value)), make('text', { x: EDGE.left - 6, y: y(value) + 4, 'text-anchor': 'end' }, text(value)));
    }
    for (const step of ticks(this.low, this.high, 8, 1)) parts.push(make('text', { x: x(step), y: HIGH - EDGE.bottom + 15, 'text-anchor': 'middle', class: 'step' }, step.toLocaleString('en')));
    for (const step of marks) parts.push(rule(x(step), EDGE.top, x(step), HIGH - EDGE.bottom, { 'stroke-dasharray': '2 3', stroke: 'var(--edge)' }));
    for (const curve of shown) {
      const points = places(curve).map((k) => [x(curve.steps[k]).toFixed(1), y(curve.values[k]).toFixed(1)]);
      parts.push(make('path', { stroke: curve.colour, d: points.map(([across, down], k) => `${k ? 'L' : 'M'}${across} ${down}`).join('') }));
      if (points.length <= FEW) parts.push(...points.map(([cx, cy]) => make('circle', { cx, cy, r: 2.5, fill: curve.colour })));
    }
    if (this.at !== null) parts.push(rule(x(this.steps[this.at]), EDGE.top, x(this.steps[this.at]), HIGH - EDGE.bottom, { stroke: 'var(--ink)' }));
    parts.push(make('text', { x: (EDGE.left + this.wide) / 2, y: HIGH - 4, 'text-anchor': 'middle' }, 'step'));
    parts.push(make('text', { transform: `translate(11 ${HIGH / 2 - 10}) rotate(-90)`, 'text-anchor': 'middle' }, this.label));
    picture.replaceChildren(...parts);
  }
}

const drawn = charts.map((spec) => new Chart(spec));
const draw = () => drawn.forEach((chart) => chart.draw()); // after all have their place
draw();
window.addEventListener('resize', draw);
