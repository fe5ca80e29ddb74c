// Pieces of the page, which are compressed.

const unpack = (number) => inflate(document.getElementById('blob-' + number).textContent);

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new DecompressionStream('deflate');
  const writer = stream.writable.getWriter();
  const written = writer.write(packed).then(() => writer.close());
  const reader = stream.readable.getReader();
  const parts = [];
  for (let part = await reader.read(); !part.done; part = await reader.read()) parts.push(part.value);
  await written;
  const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) {
    bytes.set(part, place);
    place += part.length;
  }
  return bytes;
}

async function unpackText(number) {
  return new TextDecoder().decode(await unpack(number));
}
