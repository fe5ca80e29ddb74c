// Samples of a target along the first two principal components, coloured by cluster.

const MARGIN = 46;

class Landscape {
  constructor(canvas, events) {
    Object.assign(this, { canvas, events, ensemble: null, chosen: null, note: '' });
    const near = (event) => {
      const box = canvas.getBoundingClientRect();
      return this.memberAt(event.clientX - box.left, event.clientY - box.top);
    };
    canvas.addEventListener('pointermove', (event) => events.hover(near(event)));
    canvas.addEventListener('pointerleave', () => events.hover(null));
    canvas.addEventListener('click', (event) => {
      const found = near(event);
      if (found) events.choose(found.row);
    });
    canvas.addEventListener('keydown', (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!this.ensemble || (!step && event.key !== 'Enter')) return;
      event.preventDefault();
      const { members } = this.ensemble;
      if (step) this.at = ((this.at ?? members.findIndex((one) => one.row === this.chosen)) + step + members.length) % members.length;
      if (step) events.hover(members[this.at]);
      else if (this.at !== undefined) events.choose(members[this.at].row);
      this.draw();
    });
  }

  show(row) {
    this.chosen = row;
    this.at = undefined;
    const found = meta.ensembles.find((one) => one.target === row.target) || null;
    this.ensemble = found && { ...found, members: found.members.map((one) => ({ ...one, row: meta.rows[one.row] })) };
    if (!found) {
      this.note = '';
      return;
    }
    const clusters = new Set(found.members.map((one) => one.cluster)).size;
    this.note = `${found.members.length} samples in ${clusters} cluster${clusters === 1 ? '' : 's'}; point at a sample to see its name.`;
    const range = (key) => {
      const values = this.ensemble.members.map((one) => one[key]);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      return [low, Math.max(high - low, 1e-6)];
    };
    this.range = [range('x'), range('y')];
  }

  placeOf(member) {
    const { clientWidth: wide, clientHeight: tall } = this.canvas;
    const [[left, width], [low, height]] = this.range;
    return [
      MARGIN + ((member.x - left) / width) * (wide - MARGIN - 14),
      tall - MARGIN - ((member.y - low) / height) * (tall - MARGIN - 14),
    ];
  }

  memberAt(x, y) {
    let [best, distance] = [null, 12];
    for (const member of this.ensemble ? this.ensemble.members : []) {
      const [u, v] = this.placeOf(member);
      const found = Math.hypot(u - x, v - y);
      if (found < distance) [best, distance] = [member, found];
    }
    return best;
  }

  draw() {
    if (!this.ensemble) return;
    const { context, width: wide, height: tall } = fit(this.canvas);
    context.strokeRect(MARGIN - 12, 4, wide - MARGIN + 8, tall - MARGIN + 8);
    context.textAlign = 'center';
    const [first, second] = this.ensemble.shares.map((share) => `${Math.round(100 * share)}% of the variance`);
    context.fillText(`component 1, ${first}`, wide / 2, tall - 12);
    upright(context, `component 2, ${second}`, 16, tall / 2);
    for (const member of this.ensemble.members) {
      const [x, y] = this.placeOf(member);
      const isChosen = member.row === this.chosen;
      context.beginPath();
      context.arc(x, y, isChosen ? 7 : 4, 0, 2 * Math.PI);
      context.fillStyle = chainColour(member.cluster - 1);
      context.fill();
      if (isChosen || member === this.ensemble.members[this.at]) {
        context.strokeStyle = token(isChosen ? 'ink' : 'accent');
        context.lineWidth = 2;
        context.stroke();
        context.lineWidth = 1;
      }
    }
  }
}
