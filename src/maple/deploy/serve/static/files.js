// Files from drops, folders and the clipboard.

/** All files of a drop, also those in dropped folders, as ``{file, name}``; hidden files are left out. */
export async function droppedFiles(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean); // before any await
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files].map(named);
  const found = [];
  for (const entry of entries) await walk(entry, found);
  return found;
}

/** The images that were pasted; those without a name of their own are numbered. */
export function pastedFiles(clipboard, nPasted) {
  return [...clipboard.files]
    .filter((file) => file.type.startsWith("image/"))
    .map((file, i) => ({ file, name: file.name === "image.png" ? `pasted-${nPasted + i + 1}.png` : file.name }));
}

export const named = (file) => ({ file, name: file.name });

async function walk(entry, found) {
  if (entry.name.startsWith(".")) return;
  if (entry.isFile) {
    const file = await new Promise((done, fail) => entry.file(done, fail));
    found.push({ file, name: entry.fullPath.replace(/^\//, "") });
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const entries = await new Promise((done, fail) => reader.readEntries(done, fail)); // some at a time, then none
    if (!entries.length) return;
    for (const inner of entries.toSorted((a, b) => a.name.localeCompare(b.name, "en"))) await walk(inner, found);
  }
}
