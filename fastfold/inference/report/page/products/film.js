// The film of a design in the viewer: the CA atoms of each frame as a model of one trajectory.

const FILM_CHAINS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ';

function filmText({ frames, chains, step }, points) {
  const count = chains.reduce((sum, length) => sum + length, 0);
  const lines = [];
  for (let frame = 0; frame < frames; frame++) {
    lines.push(`MODEL     ${String(frame + 1).padStart(4)}`);
    let i = 0;
    chains.forEach((length, chain) => {
      for (let residue = 1; residue <= length; residue++, i++) {
        const at = [0, 1, 2].map((axis) => (points.getInt16(6 * (frame * count + i) + 2 * axis, true) * step).toFixed(3).padStart(8));
        const head = `${String(i + 1).padStart(5)}  CA  GLY ${FILM_CHAINS[chain % FILM_CHAINS.length]}${String(residue % 10000).padStart(4)}`;
        lines.push(`ATOM  ${head}    ${at.join('')}  1.00  0.00           C  `);
      }
    });
    lines.push('ENDMDL');
  }
  return [...lines, 'END', ''].join('\n');
}

class FilmView {
  constructor(element) {
    Object.assign(this, { element, turn: 0, model: null, loaded: Promise.resolve() });
  }

  // Show a film; a later call overtakes an earlier one.
  show(film, points) {
    const turn = ++this.turn;
    this.model = null;
    this.element.dataset.shown = '';
    this.loaded = this.loaded.then(() => (turn === this.turn ? this.load(turn, film, points) : undefined));
    return this.loaded;
  }

  async load(turn, film, points) {
    if (!this.plugin) this.plugin = await startViewer(this.element);
    dressViewer(this.plugin);
    const { builders } = this.plugin;
    await this.plugin.clear();
    const data = await builders.data.rawData({ data: filmText(film, points), label: 'film' });
    const trajectory = await builders.structure.parseTrajectory(data, 'pdb');
    const model = await builders.structure.createModel(trajectory, { modelIndex: film.frames - 1 });
    const structure = await builders.structure.createStructure(model);
    if (turn !== this.turn) return;
    const all = await builders.structure.tryCreateComponentStatic(structure, 'all');
    await builders.structure.representation.addRepresentation(all, { type: 'backbone', color: 'chain-id' });
    this.plugin.managers.camera.reset(undefined, 0);
    this.model = model;
    this.told();
  }

  // Show a frame, after those that were asked for before it.
  go(frame) {
    const turn = this.turn;
    this.loaded = this.loaded.then(async () => {
      if (turn !== this.turn || !this.model) return;
      await this.plugin.build().to(this.model.ref).update({ modelIndex: frame }).commit();
      this.told();
    });
    return this.loaded;
  }

  told() {
    const cell = this.plugin.state.data.cells.get(this.model.ref);
    this.element.dataset.shown = String(cell.obj.data.modelNum);
  }
}
