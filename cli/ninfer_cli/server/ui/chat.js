// The chat page: one conversation in memory, streamed from /v1/chat/completions of this server.

import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const state = { turns: [], images: [], running: null, vision: new Map() };
// One conversation turn: {role, text, thought, images, foot, node}. Only settings outlive the page; keys only its tab.
const kept = ["system", "temperature", "limit", "thinking", "model"];

// --- requests --------------------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(answer) {
  let text = `the server answered ${answer.status}`;
  try {
    text = (await answer.json()).error.message;
  } catch {
    // Not our JSON (a proxy's page): the status has to do.
  }
  if (answer.status === 401) openOptions(true);
  return new Error(text);
}

async function listModels() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (answer.status === 503) throw new Error("The model is being loaded.");
    if (!answer.ok) throw await failure(answer);
    const { data } = await answer.json();
    const chosen = $("model").value || localStorage.getItem("ninfer-model");
    $("model").replaceChildren(...data.map((entry) => new Option(entry.id, entry.id)));
    if (data.some((entry) => entry.id === chosen)) $("model").value = chosen;
    state.vision = new Map(data.map((entry) => [entry.id, entry.architecture.input_modalities.includes("image")]));
    showVision();
    notice("");
  } catch (error) {
    notice(error.message);
    setTimeout(listModels, 2000);
  }
}

function content(turn) {
  if (!turn.images?.length) return turn.text;
  const images = turn.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return turn.text ? [...images, { type: "text", text: turn.text }] : images;
}

function requestBody() {
  const said = state.turns.filter((turn) => turn.role === "user" || turn.text); // not what failed before its first word
  const messages = said.map((turn) =>
    turn.role === "user"
      ? { role: "user", content: content(turn) }
      : { role: "assistant", content: turn.text, ...(turn.thought ? { reasoning_content: turn.thought } : {}) },
  );
  const system = $("system").value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const body = { messages, stream: true, stream_options: { include_usage: true }, enable_thinking: $("thinking").checked };
  if ($("model").value) body.model = $("model").value;
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("limit").value !== "") body.max_tokens = Number($("limit").value);
  return body;
}

/** The JSON objects of a server-sent stream, as they come. Throws what the stream itself reports as an error. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended before the answer was complete");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function generate() {
  const body = requestBody();
  const turn = addTurn({ role: "assistant", text: "", thought: "" });
  const stop = new AbortController();
  state.running = stop;
  showRunning();
  const began = performance.now();
  const waiting = setInterval(() => showWaiting(turn, began), 250);
  showWaiting(turn, began);
  let first = 0;
  let end = null;
  let reason = "";
  try {
    const answer = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: stop.signal,
    });
    if (!answer.ok) throw await failure(answer);
    for await (const event of events(answer)) {
      const choice = event.choices[0];
      const thought = choice?.delta.reasoning_content ?? choice?.delta.reasoning ?? "";
      const text = choice?.delta.content ?? "";
      if ((thought || text) && !first) {
        first = performance.now() - began;
        clearInterval(waiting);
        turn.foot = [];
      }
      turn.thought += thought;
      turn.text += text;
      reason = choice?.finish_reason ?? reason;
      if (event.usage) end = event;
      schedule(turn);
    }
    turn.foot = figures(end, first, reason);
  } catch (error) {
    turn.failed = !stop.signal.aborted;
    turn.foot = turn.failed ? [error.message] : ["stopped"];
  } finally {
    clearInterval(waiting);
    state.running = null;
    turn.done = true;
    draw(turn);
    showRunning();
    $("prompt").focus();
  }
}

/** What is shown under an answer, from the last chunk's usage and timings. */
function figures(end, first, reason) {
  if (!end) return [];
  const { usage, timings } = end;
  const shown = [`${usage.completion_tokens} tokens`];
  if (timings.predicted_per_second) shown.push(`${timings.predicted_per_second.toFixed(1)} tok/s`);
  if (first) shown.push(`first after ${(first / 1000).toFixed(2)} s`);
  if (timings.draft_n) shown.push(`${Math.round((100 * timings.draft_n_accepted) / timings.draft_n)} % of drafts accepted`);
  const cached = usage.prompt_tokens_details.cached_tokens;
  shown.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
  if (reason === "length") shown.push("cut at the limit");
  return shown;
}

// --- the conversation ------------------------------------------------------------------------------------------

function make(name, className, ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function addTurn(turn) {
  $("empty").hidden = true;
  turn.node = make("article", `turn ${turn.role}`);
  if (turn.role === "user") {
    if (turn.images.length) turn.node.append(make("div", "thumbs", ...turn.images.map(picture)));
    if (turn.text) turn.node.append(make("div", "text", turn.text));
  } else {
    turn.body = make("div");
    turn.summary = make("summary");
    turn.fold = make("details", "thought", turn.summary, turn.body);
    turn.fold.hidden = true;
    turn.answer = make("div", "answer");
    turn.line = make("div", "foot");
    turn.node.append(turn.fold, turn.answer, turn.line);
  }
  state.turns.push(turn);
  for (const other of state.turns) if (other.done) draw(other); // only the last answer can be asked for again
  log.append(turn.node);
  log.scrollTop = log.scrollHeight;
  return turn;
}

function picture(url) {
  const node = make("img");
  node.src = url;
  node.alt = "attached image";
  return node;
}

function showWaiting(turn, began) {
  const seconds = (performance.now() - began) / 1000;
  turn.foot = [seconds < 1 ? "…" : `waiting, ${seconds.toFixed(0)} s (loading a model can take minutes)`];
  draw(turn);
}

/** Draw at the next frame, once for all the chunks until then. */
function schedule(turn) {
  if (turn.scheduled) return;
  turn.scheduled = true;
  requestAnimationFrame(() => draw(turn));
}

function draw(turn) {
  turn.scheduled = false;
  const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  turn.fold.hidden = !turn.thought;
  turn.summary.textContent = turn.text || turn.done ? "Thought" : "Thinking…";
  // Only what is new: a long thought would otherwise be laid out again and again.
  const known = turn.body.textContent.length;
  if (turn.thought.length > known) turn.body.append(turn.thought.slice(known));
  if (turn.drawn !== turn.text) {
    turn.answer.replaceChildren(...markdown(turn.text));
    turn.drawn = turn.text;
  }
  turn.line.replaceChildren(...(turn.foot ?? []).map((text) => make("span", turn.failed ? "failed" : "", text)));
  if (turn.done) turn.line.append(...actions(turn));
  if (follow) log.scrollTop = log.scrollHeight;
}

function action(label, work) {
  const node = make("button", "", label);
  node.type = "button";
  node.onclick = () => work(node);
  return node;
}

function actions(turn) {
  const shown = [];
  if (turn.text && navigator.clipboard) {
    shown.push(action("copy", async (node) => {
      await navigator.clipboard.writeText(turn.text);
      node.textContent = "copied";
    }));
  }
  if (turn === state.turns.at(-1)) {
    shown.push(action("again", () => {
      if (state.running) return;
      state.turns.pop();
      turn.node.remove();
      generate();
    }));
  }
  return shown;
}

function send() {
  const text = $("prompt").value.trim();
  if (state.running || (!text && !state.images.length)) return;
  addTurn({ role: "user", text, images: state.images });
  state.images = [];
  showImages();
  $("prompt").value = "";
  fit();
  generate();
}

// --- images ----------------------------------------------------------------------------------------------------

function addFiles(files) {
  if (!state.vision.get($("model").value)) return;
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const reader = new FileReader();
    reader.onload = () => {
      state.images.push(reader.result);
      showImages();
    };
    reader.readAsDataURL(file);
  }
}

function showImages() {
  $("images").replaceChildren(...state.images.map((url, index) => {
    const node = action("", () => {
      state.images.splice(index, 1);
      showImages();
    });
    node.title = "Remove this image";
    node.append(picture(url));
    return node;
  }));
}

function showVision() {
  $("attach").hidden = !state.vision.get($("model").value);
}

// --- the rest of the page --------------------------------------------------------------------------------------

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function showRunning() {
  $("send").hidden = Boolean(state.running);
  $("stop").hidden = !state.running;
  log.setAttribute("aria-busy", String(Boolean(state.running)));
}

function openOptions(open) {
  $("options").hidden = !open;
  $("options-button").setAttribute("aria-expanded", String(open));
}

function fit() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

const themes = ["auto", "light", "dark"];
function theme(name) {
  localStorage.setItem("ninfer-theme", name);
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name[0].toUpperCase() + name.slice(1);
}

function clear() {
  state.running?.abort();
  for (const turn of state.turns) turn.node.remove();
  state.turns = [];
  $("empty").hidden = false;
  $("prompt").focus();
}

for (const id of kept) {
  const field = $(id);
  const name = field.type === "checkbox" ? "checked" : "value";
  const before = localStorage.getItem(`ninfer-${id}`);
  if (before !== null && id !== "model") field[name] = name === "checked" ? before === "true" : before;
  field.addEventListener("change", () => localStorage.setItem(`ninfer-${id}`, String(field[name])));
}
$("key").value = sessionStorage.getItem("ninfer-key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("ninfer-key", $("key").value);
  listModels();
});
$("model").addEventListener("change", showVision);
$("theme").onclick = () => theme(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]);
$("options-button").onclick = () => openOptions($("options").hidden);
$("clear").onclick = clear;
$("stop").onclick = () => state.running?.abort();
$("files").onchange = (event) => {
  addFiles(event.target.files);
  event.target.value = "";
};
$("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
$("prompt").oninput = fit;
$("prompt").onkeydown = (event) => {
  // While an input method composes a character, Enter belongs to it.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};
$("prompt").onpaste = (event) => addFiles(event.clipboardData.files);
for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
  $("composer").addEventListener(name, (event) => {
    event.preventDefault();
    $("composer").classList.toggle("over", over);
    if (name === "drop") addFiles(event.dataTransfer.files);
  });
}
document.onkeydown = (event) => {
  if (event.key === "Escape") state.running?.abort();
};
theme(localStorage.getItem("ninfer-theme") ?? "auto");
showRunning();
listModels();
