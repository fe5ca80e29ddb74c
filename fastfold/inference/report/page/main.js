// What happens when the page opens, and when its size or theme changes.

byId('find').addEventListener('input', drawRows);
byId('where').addEventListener('input', drawRows);
byId('best').addEventListener('change', () => {
  drawHead();
  drawRows();
});
byId('wide').addEventListener('change', () => {
  drawHead();
  drawPage();
});
byId('side-find').addEventListener('input', drawSide);
byId('previous').addEventListener('click', () => turn(-1));
byId('next').addEventListener('click', () => turn(1));
byId('score').replaceChildren(...pairScores.map(([key, label]) => make('option', label, { value: key })));
byId('score').addEventListener('change', drawMatrix);
byId('overlay').addEventListener('click', overlay);
byId('together').addEventListener('change', models);
byId('compared').addEventListener('change', withReference);
byId('single').addEventListener('click', () => {
  byId('single').hidden = true;
  legend();
  view.show(state.prediction);
});

function repaint() {
  redraw();
  drawMatrix();
  scan.draw();
}

window.addEventListener('resize', repaint);
arrange();
drawTables();
drawExplanations();
drawFailures();
drawHead();
drawRows();
drawSide();
choose(rowOfAddress(location.hash) || (mutants.length ? meta.rows.find((row) => row.mutation === undefined) : product && kept[0]) || meta.rows[0]);
offerTheme(() => {
  view.dress();
  repaint();
});
