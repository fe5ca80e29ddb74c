// Letters of all chains in groups of ten: secondary structure above, pLDDT below; pointing works as in the charts.

const LONGEST_TRACK = 5000;

function drawSequence(prediction, { hover, pick }) {
  const track = byId('sequence');
  byId('sequence-panel').hidden = prediction.length > LONGEST_TRACK;
  if (prediction.length > LONGEST_TRACK) return;
  const letters = prediction.length > 2500 ? null : secondaryStructure(prediction);
  byId('sequence-legend').replaceChildren(...legendOf([...(letters ? [['var(--helix)', 'helix'], ['var(--strand)', 'strand']] : []),
    ...meta.style.bands.map(({ color, low, high }) => [color, `${low}–${high}`])]));
  track.replaceChildren(...prediction.chains.map((chain) => {
    const line = make('div', undefined, { class: 'chain' });
    if (prediction.chains.length > 1) line.append(make('h3', `Chain ${chain.name}, ${counted(chain.length, 'residue')}`));
    let ten = null;
    for (let at = 0; at < chain.length; at++) {
      const residue = chain.start + at;
      if (at % 10 === 0 || chain.numbers[at] !== chain.numbers[at - 1] + 1) {
        ten = make('div', undefined, { class: 'ten' }, make('small', String(chain.labels[at])));
        line.append(ten);
      }
      const letter = make('span', chain.sequence[at], { class: letters ? letters[residue] : '', style: `border-color: ${bandOf(prediction.plddt[residue]).color}` });
      letter.dataset.residue = String(residue);
      ten.append(letter);
    }
    return line;
  }));
  const residueOf = (event) => (event.target.dataset.residue === undefined ? null : Number(event.target.dataset.residue));
  track.onpointermove = (event) => hover(residueOf(event));
  track.onpointerleave = () => hover(null);
  track.onclick = (event) => { if (residueOf(event) !== null) pick(residueOf(event)); };
}

// Mark the letter of a residue; null for none.
function markLetter(residue) {
  const last = document.querySelector('#sequence .at');
  if (last) last.classList.remove('at');
  const letter = residue === null ? null : document.querySelector(`#sequence [data-residue="${residue}"]`);
  if (letter) letter.classList.add('at');
}
