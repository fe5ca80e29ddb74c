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
  }

  show(row) {
    this.chosen = row;
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
    const { clientWidth: wide, clientHeight: tall } = this.canvas;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(wide * ratio);
    this.canvas.height = Math.round(tall * ratio);
    const context = this.canvas.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.strokeStyle = meta.style.faint;
    context.strokeRect(MARGIN - 12, 4, wide - MARGIN + 8, tall - MARGIN + 8);
    context.fillStyle = meta.style.ink;
    context.font = '12px sans-serif';
    context.textAlign = 'center';
    const [first, second] = this.ensemble.shares.map((share) => `${Math.round(100 * share)}% of the variance`);
    context.fillText(`component 1, ${first}`, wide / 2, tall - 12);
    context.save();
    context.translate(16, tall / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(`component 2, ${second}`, 0, 0);
    context.restore();
    for (const member of this.ensemble.members) {
      const [x, y] = this.placeOf(member);
      const isChosen = member.row === this.chosen;
      context.beginPath();
      context.arc(x, y, isChosen ? 7 : 4, 0, 2 * Math.PI);
      context.fillStyle = chainColour(member.cluster - 1);
      context.fill();
      if (isChosen) {
        context.strokeStyle = meta.style.ink;
        context.lineWidth = 2;
        context.stroke();
        context.lineWidth = 1;
      }
    }
  }
}
