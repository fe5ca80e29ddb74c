// Start the page's program, which is one of its packed pieces.

const place = document.currentScript;
unpackText(place.dataset.program).then((text) => {
  const script = document.createElement('script');
  script.textContent = text;
  document.head.append(script);
});
