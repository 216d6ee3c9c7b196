// The page of `trellis serve`. A session is a chain of states: each answer makes a new one, and
// going on from an older one is a fork. Everything is asked of the server that sent this file.
"use strict";

const $ = (id) => document.getElementById(id);
const page = { model: null, states: new Map(), current: null, busy: null, tokens: [], full: new Map() };

// Asking the server.

function headers(more = {}) {
  const key = sessionStorage.getItem("key");
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (answer.status === 401) {
    const key = await question("The API key of this server", "");
    if (key) {
      sessionStorage.setItem("key", key);
      return ask(path, options);
    }
  }
  if (!answer.ok) {
    let why = `${answer.status} ${answer.statusText}`;
    try { why = (await answer.json()).error.message; } catch { /* not JSON */ }
    throw new Error(why);
  }
  return answer;
}

const json = async (path, method = "GET", body) => (await ask(path, {
  method, body: body && JSON.stringify(body), headers: body ? { "Content-Type": "application/json" } : {},
})).json();

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((l) => l.startsWith("data: ")).map((l) => l.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const content = JSON.parse(data);
      if (content.error?.message) throw new Error(content.error.message);
      yield content;
    }
  }
}

// Small things.

function say(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", bad);
}

function bytes(n) {
  if (n < 1024) return `${n} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    n /= 1024;
    if (n < 1024) return `${n.toFixed(n < 10 ? 2 : n < 100 ? 1 : 0)} ${unit}`;
  }
  return `${n.toFixed(0)} PiB`;
}

function question(text, value, choose = false) {
  $("question").textContent = text;
  $("asked").hidden = choose;
  $("asked").value = value;
  $("ask").returnValue = "";
  $("ask").showModal();
  return new Promise((resolve) => {
    $("ask").addEventListener("close", () => {
      resolve($("ask").returnValue === "ok" ? (choose ? true : $("asked").value.trim()) : null);
    }, { once: true });
  });
}

async function guarded(action) {
  try { await action(); } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  }
}

// The tree: states that follow each other without a branch are one session.

function sessions() {
  const children = new Map();
  for (const state of page.states.values()) {
    const parent = page.states.has(state.parent) ? state.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(state);
  }
  const session = (state) => {
    const chain = [state];
    let below = [];
    for (;;) {
      const next = children.get(chain.at(-1).id) || [];
      const plain = next.filter((s) => s.kind !== "fork");
      below = below.concat(next.filter((s) => s.kind === "fork"));
      if (plain.length !== 1) { below = below.concat(plain); break; }
      chain.push(plain[0]);
    }
    const named = chain.findLast((s) => s.name);
    const preview = chain.find((s) => s.preview)?.preview.split("\n")[0].slice(0, 60);
    const name = named?.name || preview || (state.kind === "fork" ? "fork" : state.id);
    return { chain, last: chain.at(-1), name, below: below.map(session) };
  };
  return (children.get(null) || []).map(session).reverse();
}

function sessionOf(id, list = sessions()) {
  for (const one of list) {
    if (one.chain.some((s) => s.id === id)) return one;
    const found = sessionOf(id, one.below);
    if (found) return found;
  }
  return null;
}

function drawTree() {
  const draw = (list) => list.map((one) => {
    const li = document.createElement("li");
    li.setAttribute("role", "treeitem");
    li.dataset.id = one.last.id;
    const selected = one.chain.some((s) => s.id === page.current);
    li.setAttribute("aria-selected", selected);
    li.tabIndex = selected ? 0 : -1;
    const item = document.createElement("span");
    item.className = "item";
    item.textContent = one.name.slice(0, 90);
    const count = document.createElement("span");
    count.className = "count";
    count.textContent = `${one.last.tokens.toLocaleString()} tokens, ${bytes(one.last.bytes)}`;
    item.append(count);
    item.addEventListener("click", () => open(one.last.id));
    li.append(item);
    if (one.below.length) {
      li.setAttribute("aria-expanded", true);
      const ul = document.createElement("ul");
      ul.setAttribute("role", "group");
      ul.append(...draw(one.below));
      li.append(ul);
    }
    return li;
  });
  const list = sessions();
  $("tree").replaceChildren(...draw(list));
  const items = [...$("tree").querySelectorAll("li")];
  if (items.length && !items.some((li) => li.tabIndex === 0)) items[0].tabIndex = 0;
  $("no-sessions").hidden = list.length > 0;
  const mine = page.current && sessionOf(page.current, list);
  $("title").textContent = mine ? mine.name.slice(0, 120) : "New session";
  for (const id of ["fork", "rename", "download", "delete"]) $(id).disabled = !page.current || !!page.busy;
}

$("tree").addEventListener("keydown", (event) => {
  const items = [...$("tree").querySelectorAll("li")];
  const at = items.indexOf(event.target);
  const go = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (event.key === "Enter" || event.key === " ") open(event.target.dataset.id);
  else if (event.key === "ArrowLeft") event.target.parentElement.closest("li")?.focus();
  else if (event.key === "ArrowRight") event.target.querySelector("li")?.focus();
  else if (go === undefined) return;
  else items[Math.max(0, Math.min(items.length - 1, go))]?.focus();
  event.preventDefault();
});

async function refresh() {
  const states = [];
  for (let more = true; more;) {
    const after = states.length ? `?after=${states.at(-1).id}` : "";
    const found = await json(`v1/states${after}`);
    states.push(...found.data);
    more = found.has_more;
  }
  page.states = new Map(states.map((s) => [s.id, s]));
  if (page.current && !page.states.has(page.current)) page.current = null;
  drawTree();
  drawSizes();
}

async function open(id) {
  if (page.busy) return;
  page.current = id;
  history.replaceState(null, "", id ? `#${id}` : location.pathname);
  drawTree();
  drawSizes();
  const path = [];
  for (let s = page.states.get(id); s; s = page.states.get(s.parent)) path.unshift(s.id);
  const whole = await Promise.all(path.map(async (one) => {
    if (!page.full.has(one)) page.full.set(one, await json(`v1/states/${one}`));
    return page.full.get(one);
  }));
  if (page.current !== id) return;
  $("text").replaceChildren();
  for (const state of whole) {
    if (state.kind === "upload") note(`a state of ${state.tokens.toLocaleString()} tokens was uploaded`);
    if (state.kind === "read") note(`a document was read; it ends with:`);
    show(state.input, true, state.kind === "response");
    show(state.output, false, state.kind === "response");
  }
  $("text").scrollTop = $("text").scrollHeight;
  const kind = whole.findLast((state) => ["completion", "response"].includes(state.kind))?.kind;
  if (kind && page.model.trellis.chat) {  // go on as the session did
    document.querySelector(`input[value=${kind === "response" ? "chat" : "complete"}]`).checked = true;
  }
  closePanels();
}

function show(text, given, turn) {
  const span = document.createElement("span");
  span.textContent = text;
  if (given) span.classList.add("given");
  if (turn && page.model.trellis.chat) span.classList.add("turn");
  if (text || !given) $("text").append(span);
  return span;
}

function note(text) {
  const span = document.createElement("span");
  span.className = "note";
  span.textContent = text;
  $("text").append(span);
}

// Going on.

const mode = () => document.querySelector("input[name=mode]:checked").value;

function setBusy(abort) {
  page.busy = abort;
  $("send").disabled = $("read").disabled = $("new").disabled = $("upload").disabled = !!abort;
  $("stop").hidden = !abort;
  drawTree();
}

async function goOn(event) {
  event?.preventDefault();
  const prompt = $("prompt").value;
  if (page.busy || (!prompt && !page.current)) {
    say("Write a text to go on from.");
    $("prompt").focus();
    return;
  }
  const abort = new AbortController();
  setBusy(abort);
  say("reading…");
  const chat = mode() === "chat";
  show(prompt, true, chat);
  const span = show("", false, chat);
  const memory = $("watch").checked && $("layer").value !== ""
    ? { layer: Number($("layer").value), head: Number($("head").value) } : undefined;
  const seed = $("seed").value === "" ? undefined : Number($("seed").value);
  const common = { stream: true, temperature: Number($("temperature").value), top_p: 0.95, seed, memory };
  const limit = Number($("tokens").value) || 120;
  const body = chat
    ? { ...common, input: prompt, previous_response_id: page.current ?? undefined, max_output_tokens: limit }
    : { ...common, prompt, state: page.current ?? undefined, return_state: true, max_tokens: limit };
  let kept = null, count = 0;
  const started = performance.now();
  page.tokens = [];
  try {
    const answer = await ask(chat ? "v1/responses" : "v1/completions", {
      method: "POST", body: JSON.stringify(body), signal: abort.signal,
      headers: { "Content-Type": "application/json" },
    });
    $("prompt").value = "";
    for await (const content of events(answer)) {
      const choice = content.choices?.[0] ?? content;
      const text = choice.text ?? choice.delta;
      if (content.response?.error) throw new Error(content.response.error.message);
      if (typeof text === "string" && text) { span.textContent += text; count += 1; }
      const seen = choice.memory;
      if (seen) { page.tokens.push(...seen); page.tokens.splice(0, page.tokens.length - 400); later(drawMemory); }
      kept = choice.state ?? content.response?.state ?? kept;
      const near = $("text").scrollHeight - $("text").scrollTop - $("text").clientHeight < 120;
      if (near) $("text").scrollTop = $("text").scrollHeight;
      const seconds = (performance.now() - started) / 1000;
      say(`${count} pieces in ${seconds.toFixed(1)} s`);
    }
  } catch (error) {
    if (error.name === "AbortError") say("Stopped: the session is where it was before.");
    else say(error.message, true);
  } finally {
    setBusy(null);
  }
  if (kept) page.current = kept.id;
  await guarded(async () => { await refresh(); if (page.current) await open(page.current); });
  $("prompt").focus();
}

async function readFile(file) {
  if (!file || page.busy) return;
  if (file.name.endsWith(".safetensors")) return uploadState(file);
  const abort = new AbortController();
  setBusy(abort);
  $("progress").hidden = false;
  $("meter").removeAttribute("value");
  $("progress-text").textContent = `sending ${file.name}, ${bytes(file.size)}`;
  try {
    const query = new URLSearchParams({ name: file.name.slice(0, 200) });
    if (page.current) query.set("state", page.current);
    const answer = await ask(`v1/read?${query}`, { method: "POST", body: file, signal: abort.signal });
    for await (const content of events(answer)) {
      if (content.type === "progress") {
        $("meter").value = content.bytes / content.total_bytes;
        $("progress-text").textContent =
          `reading ${file.name}: ${content.tokens.toLocaleString()} tokens, ${bytes(content.bytes)} of ${bytes(content.total_bytes)}`;
      } else if (content.type === "done") {
        page.current = content.state.id;
        say(`${file.name} is read: ${content.state.tokens.toLocaleString()} tokens in ${bytes(content.state.bytes)}`);
      }
    }
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped: nothing was kept." : error.message, error.name !== "AbortError");
  } finally {
    $("progress").hidden = true;
    setBusy(null);
  }
  await guarded(async () => { await refresh(); if (page.current) await open(page.current); });
}

async function uploadState(file) {
  await guarded(async () => {
    const name = encodeURIComponent(file.name.replace(/\.safetensors$/, "").slice(0, 200) || "uploaded");
    const answer = await ask(`v1/states?name=${name}`, { method: "POST", body: file });
    const state = await answer.json();
    say(`uploaded: ${state.tokens.toLocaleString()} tokens`);
    await refresh();
    await open(state.id);
  });
}

// What the memory holds.

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let waiting = null;
function later(action) {
  waiting ??= requestAnimationFrame(() => { waiting = null; action(); });
}

function canvas(id) {
  const target = $(id), scale = devicePixelRatio || 1;
  const width = target.clientWidth, height = Number(target.dataset.height);
  if (!width) return null;  // it is hidden
  target.width = width * scale;
  target.height = height * scale;
  target.style.height = `${height}px`;
  const drawing = target.getContext("2d");
  drawing.scale(scale, scale);
  return { drawing, width, height };
}

function drawSizes() {
  const model = page.model?.trellis;
  if (!model) return;
  const state = page.states.get(page.current);
  const tokens = state?.tokens ?? 0;
  const perToken = model.attention_bytes_per_token;
  const grows = model.state_bytes === null;
  const own = grows ? (state?.bytes ?? 0) : model.state_bytes;
  $("ours").textContent = `this state: ${bytes(own)} after ${tokens.toLocaleString()} tokens`;
  $("theirs").textContent = `attention's cache: ${bytes(tokens * perToken)}, and ${bytes(perToken)} more with every token`;
  const made = canvas("sizes");
  if (!made) return;
  const { drawing, width, height } = made;
  const crossing = grows ? 100 : own / perToken;
  const most = Math.max(tokens * 1.25, crossing * 2);
  const top = most * perToken;
  const x = (t) => 4 + (width - 8) * (t / most), y = (b) => height - 16 - (height - 26) * (b / top);
  drawing.lineWidth = 2;
  const line = (name, points, dashed = []) => {
    drawing.strokeStyle = color(name);
    drawing.setLineDash(dashed);
    drawing.beginPath();
    points.forEach(([t, b], n) => (n ? drawing.lineTo(x(t), y(b)) : drawing.moveTo(x(t), y(b))));
    drawing.stroke();
  };
  line("--theirs", [[0, 0], [tokens, tokens * perToken]]);
  line("--theirs", [[tokens, tokens * perToken], [most, top]], [3, 4]);
  line("--ours", grows ? [[0, 0], [tokens, own]] : [[0, own], [most, own]]);
  drawing.setLineDash([]);
  for (const [name, b] of [["--theirs", tokens * perToken], ["--ours", own]]) {
    drawing.fillStyle = color(name);
    drawing.beginPath(); drawing.arc(x(tokens), y(b), 4, 0, 7); drawing.fill();
  }
  drawing.fillStyle = color("--quiet");
  drawing.font = "11px system-ui, sans-serif";
  drawing.fillText("0", 4, height - 3);
  const label = `${Math.round(most).toLocaleString()} tokens`;
  drawing.fillText(label, width - 4 - drawing.measureText(label).width, height - 3);
}

function drawMemory() {
  const seen = page.tokens;
  $("memory").hidden = !seen.length;
  $("watching").hidden = seen.length > 0;
  if (!seen.length) return;
  for (const [id, name] of [["forget", "--keep"], ["step", "--write"]]) {
    const made = canvas(id);
    if (!made) return;
    const { drawing, width, height } = made;
    const wide = width / seen.length;
    drawing.fillStyle = color(name);
    seen.forEach((one, n) => {  // bars of the value memory, a line for the key memory
      const tall = (height - 2) * Math.min(1, one[id][1]);
      drawing.globalAlpha = 0.45;
      drawing.fillRect(n * wide, height - tall, Math.max(1, wide - (wide > 4 ? 1 : 0)), tall);
    });
    drawing.globalAlpha = 1;
    drawing.strokeStyle = color(name);
    drawing.lineWidth = 1.3;
    drawing.beginPath();
    seen.forEach((one, n) => {
      const x = (n + 0.5) * wide, y = height - (height - 2) * Math.min(1, one[id][0]);
      if (n) drawing.lineTo(x, y); else drawing.moveTo(x, y);
    });
    drawing.stroke();
  }

  // The strength of slots as a small picture, which the browser enlarges.
  const most = Math.max(...seen.map((one) => Math.max(...one.values)), 1e-9);
  const rows = seen[0].values.length;
  const slots = $("slots");
  slots.width = seen.length;
  slots.height = rows;
  const drawing = slots.getContext("2d");
  drawing.fillStyle = color("--ours");
  seen.forEach((one, n) => one.values.forEach((value, row) => {
    drawing.globalAlpha = Math.pow(value / most, 1.3);
    drawing.fillRect(n, row, 1, 1);
  }));

  const last = seen.findLast((one) => one.picture);
  if (!last) return;
  for (const name of ["keys", "values"]) drawPicture($(name), last.picture[name]);
  $("words").replaceChildren(...last.words.map(({ slot, tokens }) => {
    const row = document.createElement("tr");
    const first = document.createElement("td"), second = document.createElement("td");
    first.textContent = `slot ${slot}`;
    for (const token of tokens) {
      const code = document.createElement("code");
      code.textContent = token.replace(/\n/g, "⏎").replace(/ /g, "·");
      second.append(code);
    }
    row.append(first, second);
    return row;
  }));
  $("hover").textContent = `after ${JSON.stringify(seen.at(-1).token)}`;
}

function drawPicture(target, { shape: [height, width], data }) {
  const raw = atob(data);
  target.width = width;
  target.height = height;
  const drawing = target.getContext("2d");
  const image = drawing.createImageData(width, height);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  for (let n = 0; n < raw.length; n++) {
    const value = (raw.charCodeAt(n) - 128) / 127;
    const strength = Math.pow(Math.abs(value), 0.7);
    const end = value > 0 ? [194, 87, 26] : [43, 102, 177];
    const ground = dark ? 32 : 250;
    for (let c = 0; c < 3; c++) image.data[4 * n + c] = ground + (end[c] + (dark ? 50 : 0) - ground) * strength;
    image.data[4 * n + 3] = 255;
  }
  drawing.putImageData(image, 0, 0);
}

for (const id of ["forget", "step", "slots"]) {
  $(id).addEventListener("pointermove", (event) => {
    const place = Math.floor((event.offsetX / $(id).clientWidth) * page.tokens.length);
    const one = page.tokens[place];
    if (one) $("hover").textContent = `${JSON.stringify(one.token)}: keeps ${one.forget[1].toFixed(3)}, writes ${one.step[1].toFixed(3)}`;
  });
}

// Buttons.

function closePanels() {
  for (const [button, panel] of [["toggle-sessions", "sessions"], ["toggle-looks", "looks"]]) {
    $(panel).classList.remove("open");
    $(button).setAttribute("aria-expanded", false);
  }
}
for (const [button, panel] of [["toggle-sessions", "sessions"], ["toggle-looks", "looks"]]) {
  $(button).addEventListener("click", () => {
    const opened = !$(panel).classList.contains("open");
    closePanels();
    $(panel).classList.toggle("open", opened);
    $(button).setAttribute("aria-expanded", opened);
    drawSizes();
    drawMemory();
  });
}

$("form").addEventListener("submit", goOn);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) goOn(event);
});
$("stop").addEventListener("click", () => page.busy?.abort());
$("new").addEventListener("click", () => {
  page.current = null;
  page.tokens = [];
  history.replaceState(null, "", location.pathname);
  $("text").replaceChildren();
  say("");
  drawTree(); drawSizes(); drawMemory(); closePanels();
  $("prompt").focus();
});
$("fork").addEventListener("click", () => guarded(async () => {
  const name = await question("A name for the fork", `${$("title").textContent.slice(0, 40)} (fork)`);
  if (!name) return;
  const made = await json(`v1/states/${page.current}/fork`, "POST", { name });
  await refresh();
  await open(made.id);
  say("Forked: what follows here does not change the other session.");
}));
$("rename").addEventListener("click", () => guarded(async () => {
  const name = await question("The session's name", $("title").textContent);
  if (!name) return;
  await json(`v1/states/${page.current}`, "PATCH", { name: name.slice(0, 200) });
  await refresh();
}));
$("download").addEventListener("click", () => guarded(async () => {
  const answer = await ask(`v1/states/${page.current}/content`);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = /filename="([^"]+)"/.exec(answer.headers.get("content-disposition"))?.[1] ?? "state.safetensors";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}));
$("delete").addEventListener("click", () => guarded(async () => {
  const one = sessionOf(page.current);
  if (!one || !(await question(`Delete “${one.name.slice(0, 80)}”? Its forks stay.`, "", true))) return;
  for (const state of one.chain.reverse()) await json(`v1/states/${state.id}`, "DELETE");
  page.current = null;
  $("text").replaceChildren();
  history.replaceState(null, "", location.pathname);
  await refresh();
  say("Deleted.");
}));
$("upload").addEventListener("click", () => $("upload-file").click());
$("upload-file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  if (file) uploadState(file);
  event.target.value = "";
});
$("read").addEventListener("click", () => $("read-file").click());
$("read-file").addEventListener("change", (event) => {
  readFile(event.target.files[0]);
  event.target.value = "";
});

let inside = 0;
addEventListener("dragenter", (event) => { event.preventDefault(); inside += 1; $("drop").hidden = false; });
addEventListener("dragleave", () => { inside -= 1; if (inside <= 0) $("drop").hidden = true; });
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  inside = 0;
  $("drop").hidden = true;
  readFile(event.dataTransfer.files[0]);
});
addEventListener("resize", () => later(() => { drawSizes(); drawMemory(); }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawSizes(); drawMemory(); });

$("layer").addEventListener("change", fillHeads);
function fillHeads() {
  const heads = page.model.trellis.memory_layers[$("layer").value] ?? 0;
  $("head").replaceChildren(...Array.from({ length: heads }, (_, n) => new Option(n, n)));
}

async function start() {
  page.model = (await json("v1/models")).data[0];
  const { parameters, memory_layers, chat, kept_on_disk } = page.model.trellis;
  $("model").textContent = `${page.model.id}, ${parameters.toLocaleString()} parameters` +
    (kept_on_disk ? "" : "; sessions end with the server");
  const layers = Object.keys(memory_layers);
  $("layer").replaceChildren(...layers.map((n) => new Option(n, n)));
  if (layers.length) { $("layer").value = layers[Math.floor(layers.length / 2)]; fillHeads(); }
  else { $("watch").checked = false; $("watch").disabled = true; $("watching").textContent = "This model has no Trellis layer to look into."; }
  const radio = document.querySelector("input[value=chat]");
  radio.disabled = !chat;
  if (chat) radio.checked = true;
  else radio.parentElement.title = "This model has no chat template.";
  await refresh();
  const wanted = location.hash.slice(1);
  if (page.states.has(wanted)) await open(wanted);
  $("prompt").focus();
}
guarded(start);
