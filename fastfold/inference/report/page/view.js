// The 3D view: Mol*, started when the first structure is shown.

const THEME = 'fastfold';
const QUIET = 0xd5dade;

// Mol* asks for a module of its own by a data: address, which the page's policy refuses to connect to, and falls back
// after an error. The bytes are in the address, so they are answered here.
const connect = window.fetch.bind(window);
window.fetch = (address, ...rest) => {
  const found = /^data:([^;,]*);base64,(.*)$/s.exec(String(address));
  if (!found) return connect(address, ...rest);
  const bytes = Uint8Array.from(atob(found[2]), (letter) => letter.charCodeAt(0));
  return Promise.resolve(new Response(bytes, { headers: { 'Content-Type': found[1] } }));
};

// Add the viewer's style and script to the page, once.
let library = null;
function viewerLibrary() {
  const add = async (kind, blob) => {
    const element = document.createElement(kind);
    element.textContent = await unpackText(blob);
    document.head.append(element);
  };
  if (!library) library = add('style', meta.viewer.style).then(() => add('script', meta.viewer.script));
  return library;
}

// Start a viewer without its controls in an element.
async function startViewer(element) {
  await viewerLibrary();
  const off = ['layoutIsExpanded', 'layoutShowControls', 'layoutShowRemoteState', 'layoutShowSequence',
    'layoutShowLog', 'layoutShowLeftPanel', 'viewportShowExpand', 'viewportShowSelectionMode',
    'viewportShowAnimation', 'viewportShowSettings', 'viewportShowTrajectoryControls',
    'viewportShowToggleFullscreen'];
  const options = Object.fromEntries(off.map((name) => [name, false]));
  const { plugin } = await window.molstar.Viewer.create(element, { ...options, extensions: [], volumeStreamingDisabled: true });
  plugin.canvas3d.setProps({ camera: { helper: { axes: { name: 'off', params: {} } } } });
  for (const link of element.querySelectorAll('a')) link.setAttribute('aria-label', 'Mol*');
  return plugin;
}

// The ground of the theme.
function dressViewer(plugin) {
  plugin.canvas3d.setProps({ renderer: { backgroundColor: parseInt(token('raised').slice(1), 16) } });
}

class View {
  constructor(element, note, { hover, pick }) {
    Object.assign(this, { element, note, hover, pick, version: 0, mode: 'plddt', block: null, turn: 0 });
  }

  // Show a prediction; a later call overtakes an earlier one.
  async show(prediction) {
    const turn = ++this.turn;
    this.prediction = prediction;
    const reason = this.reason(prediction);
    this.note.textContent = reason;
    this.element.hidden = reason !== '';
    this.element.dataset.shown = '';
    if (reason) return;
    await this.queue(turn, () => this.load(turn));
  }

  // Show superposed structures, each in one colour; a later call overtakes an earlier one.
  async showTogether(items) {
    const turn = ++this.turn;
    this.element.dataset.shown = '';
    await this.queue(turn, () => this.loadTogether(turn, items));
  }

  // One after the other: the viewer does not take a second structure while it makes the first.
  async queue(turn, work) {
    try {
      if (!this.loaded) this.loaded = this.start();
      const load = () => (turn === this.turn ? work() : undefined);
      this.loaded = this.loaded.then(load);
      await this.loaded;
    } catch (error) {
      if (turn !== this.turn) return;
      this.loaded = this.plugin ? Promise.resolve() : null;
      this.note.textContent = `The 3D view cannot be shown: ${error.message || error}`;
      this.element.hidden = true;
    }
  }

  reason(prediction) {
    if (this.note.dataset.refused) {
      return `There is no 3D view: ${this.note.dataset.refused}.`;
    }
    if (!meta.viewer) {
      return `There is no 3D view, because the viewer was not installed: pip install ${this.note.dataset.package}, ` +
        'and make the report again.';
    }
    if (prediction.structure) return '';
    return prediction.row.omitted
      ? 'The page has no room for this structure; open its file, or make a report of fewer predictions.'
      : 'There is no structure of this prediction.';
  }

  async start() {
    this.plugin = await startViewer(this.element);
    this.plugin.representation.structure.themes.colorThemeRegistry.add(this.theme());
    this.dress();
    const { interaction } = this.plugin.behaviors;
    interaction.hover.subscribe(({ current }) => this.hover(this.residueOf(current.loci)));
    interaction.click.subscribe(({ current }) => this.pick(this.residueOf(current.loci)));
  }

  dress() {
    if (this.plugin) dressViewer(this.plugin);
  }

  async load(turn) {
    const { builders } = this.plugin;
    await this.plugin.clear();
    this.representation = null;
    const data = await builders.data.rawData({ data: structureText(this.prediction), label: 'prediction' });
    const trajectory = await builders.structure.parseTrajectory(data, 'mmcif');
    const model = await builders.structure.createModel(trajectory);
    const structure = await builders.structure.createStructure(model);
    if (turn !== this.turn) return;
    const residues = new Set(this.prediction.structure.residue);
    this.present = [...residues].sort((a, b) => a - b);
    const all = await builders.structure.tryCreateComponentStatic(structure, 'all');
    const type = this.prediction.chains.some((chain) => chain.length < 4) ? 'ball-and-stick' : 'cartoon';
    this.representation = await builders.structure.representation.addRepresentation(all, {
      type, color: THEME, colorParams: { version: this.version },
    });
    this.plugin.managers.camera.reset(undefined, 0);
    this.element.dataset.shown = String(this.present.length);
  }

  async loadTogether(turn, items) {
    const { builders } = this.plugin;
    await this.plugin.clear();
    this.representation = null;
    this.present = null;
    for (const { prediction, colour, name } of items) {
      const data = await builders.data.rawData({ data: structureText(prediction), label: name });
      const trajectory = await builders.structure.parseTrajectory(data, 'mmcif');
      const model = await builders.structure.createModel(trajectory);
      const structure = await builders.structure.createStructure(model);
      if (turn !== this.turn) return;
      const all = await builders.structure.tryCreateComponentStatic(structure, 'all');
      await builders.structure.representation.addRepresentation(all, {
        type: 'cartoon', color: 'uniform', colorParams: { value: parseInt(colour.slice(1), 16) },
      });
    }
    this.plugin.managers.camera.reset(undefined, 0);
    this.element.dataset.shown = `${items.length} together`;
  }

  theme() {
    const colour = (location) => {
      const residue = this.residueAt(location);
      if (residue === null) return QUIET;
      if (this.block) {
        const within = ([from, to]) => residue >= from && residue <= to;
        if (within(this.block.columns)) return number(COLUMNS);
        if (within(this.block.rows)) return number(ROWS);
        return QUIET;
      }
      if (this.mode === 'chain') return number(chainColour(this.prediction.chainOf[residue]));
      return number(bandOf(this.prediction.plddt[residue]).color);
    };
    const number = (text) => parseInt(text.slice(1), 16);
    const factory = (context, props) => ({ factory, granularity: 'group', color: colour, props, description: '' });
    return {
      name: THEME, label: 'FastFold', category: '', factory, isApplicable: () => true,
      getParams: () => ({ version: { type: 'number', defaultValue: 0 } }), defaultValues: { version: 0 },
    };
  }

  // The residue, by its place in the complex, of one of the viewer's locations; null for none.
  residueAt(location) {
    const isBond = location.kind === 'bond-location';
    const unit = isBond ? location.aUnit : location.unit;
    if (!unit || unit.kind !== 0 || !this.present) return null;
    const element = isBond ? unit.elements[location.aIndex] : location.element;
    const residue = this.present[unit.residueIndex[element]];
    return residue === undefined ? null : residue;
  }

  residueOf(loci) {
    if (loci.kind === 'element-loci' && loci.elements.length) {
      const { unit, indices } = loci.elements[0];
      const first = window.molstar.lib.structure.StructureElement.Loci.getFirstLocation(loci);
      return first && unit && indices ? this.residueAt(first) : null;
    }
    return loci.kind === 'bond-loci' && loci.bonds.length ? this.residueAt({ kind: 'bond-location', ...loci.bonds[0] }) : null;
  }

  // Colour by `plddt` or `chain`, or show the rows and columns of a block.
  async paint(mode, block) {
    this.mode = mode;
    this.block = block;
    if (!this.representation) return;
    const version = ++this.version;
    const colorTheme = { name: THEME, params: { version } };
    await this.plugin.build().to(this.representation.ref).update((old) => ({ ...old, colorTheme })).commit();
    this.element.dataset.painted = String(version);
  }

  // Mark one residue as if it were pointed at; null for none.
  mark(residue) {
    if (!this.representation) return;
    const { lociHighlights } = this.plugin.managers.interactivity;
    const structure = this.plugin.managers.structure.hierarchy.current.structures[0];
    const data = structure && structure.cell.obj && structure.cell.obj.data;
    lociHighlights.clearHighlights();
    if (residue === null || !data) return;
    const chain = this.prediction.chains[this.prediction.chainOf[residue]];
    const schema = { label_asym_id: chain.name, label_seq_id: residue - chain.start + 1 };
    const loci = window.molstar.lib.structure.StructureElement.Schema.toLoci(data, schema);
    lociHighlights.highlightOnly({ loci }, false);
  }
}
