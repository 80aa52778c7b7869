// The page: asks ballastd every few seconds, and shows the host, its VMs, one VM, and events.
// It runs in two places: under `ballast web`, which passes GET on and nothing else, and in Cockpit, whose bridge talks
// to the socket with the user's rights, so that limits can be set there.
"use strict";

const SOCKET = "/run/ballast/api.sock";
const FAST_MS = 2000;
const MANY_MS = 5000;
const MANY = 50;
// A VM waits if it stalls for more than this part of the time, in percent.
const WAITS = 1;
const SPARKS = 60;
const EVENTS_SHOWN = 200;
const WAITING_SHOWN = 5;

const $ = (id) => document.getElementById(id);
const { size, clock } = charts;

// ---- transport ----

const bridge = globalThis.cockpit ? cockpit.http(SOCKET, { superuser: "try" }) : null;

async function ask(path) {
  if (bridge) {
    const [place, query] = path.split("?");
    return JSON.parse(await bridge.get(place, Object.fromEntries(new URLSearchParams(query))));
  }
  const answer = await fetch(`api${path}`, { cache: "no-store", signal: AbortSignal.timeout(15000) });
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 200) || `status ${answer.status}`);
  return answer.json();
}

async function change(path, patch) {
  const headers = { "Content-Type": "application/json" };
  return JSON.parse(await bridge.request({ method: "PATCH", path, headers, body: JSON.stringify(patch) }));
}

// ---- state ----

const state = {
  host: null, vms: [], events: [], lastEvent: 0, policy: null, sparks: new Map(), sort: ["stall", -1], chosen: null,
  heat: [], failedAt: null, epoch: null, note: "",
};

const percent = (vm) => vm.stall.some.avg10;
const kept = (vm) => {
  const limits = [vm.limit_bytes, vm.target_bytes].filter((bytes) => bytes !== null);
  return limits.length ? Math.min(...limits) : null;
};

const isBad = (vm) => percent(vm) > WAITS || vm.status !== "running";

// Why a VM waits or keeps its memory, in the daemon's words; empty if there is nothing to say.
const why = (vm) => vm.why ?? vm.warnings[0] ?? "";

// ---- DOM helpers: text changes only where it differs ----

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function make(tag, attributes = {}, ...children) {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...children);
  return node;
}

function fill(list, texts) {
  const wanted = texts.map(([time, text]) => `${time ?? ""}\n${text}`);
  if (list.dataset.shown === wanted.join("\n\n")) return;
  list.dataset.shown = wanted.join("\n\n");
  list.replaceChildren(...texts.map(([time, text]) =>
    make("li", {}, ...(time ? [make("time", { textContent: time })] : []), text)));
}

function pairs(list, entries) {
  list.replaceChildren(...entries.flatMap(([name, value, word]) => {
    const key = word ? [make("span", { className: "key" })] : [];
    if (word) key[0].style.background = `var(--${word})`;
    return [make("dt", {}, ...key, name), make("dd", { textContent: value })];
  }));
}

const stamp = (ms) => new Date(ms).toLocaleString("sv-SE");

// ---- the list of VMs ----

const COLUMNS = [
  ["name", "Name", (vm) => vm.name],
  ["kind", "Kind", (vm) => vm.kind],
  ["status", "Status", (vm) => vm.status],
  ["size", "Size", (vm) => vm.size_bytes],
  ["limit", "Limit", (vm) => kept(vm) ?? -1],
  ["resident", "Resident", (vm) => vm.resident_bytes],
  ["far", "Far", (vm) => vm.far_bytes],
  ["stall", "Stall", (vm) => percent(vm)],
  ["spark", "10 min", null],
  ["why", "Why", (vm) => why(vm)],
];
const NUMBERS = new Set(["size", "limit", "resident", "far", "stall"]);
const rows = new Map();
const seen = new WeakMap();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    seen.set(entry.target, entry.isIntersecting);
    if (entry.isIntersecting) drawSpark(entry.target.dataset.name);
  }
}, { rootMargin: "100px" });

function heads() {
  $("heads").replaceChildren(...COLUMNS.map(([key, title, by]) => {
    const sorted = state.sort[0] === key ? (state.sort[1] > 0 ? "ascending" : "descending") : "none";
    const mark = { ascending: " ▲", descending: " ▼", none: "" }[sorted];
    const head = make("th", { scope: "col", className: NUMBERS.has(key) ? "number" : "" });
    if (!by) {
      head.append(make("button", { type: "button", textContent: title, disabled: true }));
      return head;
    }
    head.setAttribute("aria-sort", sorted);
    const button = make("button", { type: "button", textContent: title + mark });
    button.addEventListener("click", () => {
      const turns = state.sort[0] === key ? -state.sort[1] : (NUMBERS.has(key) ? -1 : 1);
      state.sort = [key, turns];
      heads();
      list();
      [...$("heads").children][COLUMNS.findIndex((column) => column[0] === key)].firstChild.focus();
    });
    head.append(button);
    return head;
  }));
}

function newRow(vm) {
  const button = make("button", { type: "button", textContent: vm.name, title: vm.name });
  button.addEventListener("click", () => choose(vm.name));
  const cells = COLUMNS.map(([key]) => make("td", { className: NUMBERS.has(key) ? "number" : key }));
  const line = make("canvas");
  line.setAttribute("role", "img");
  line.dataset.name = vm.name;
  cells[0].append(button);
  cells[8].append(line);
  watcher.observe(line);
  const row = { node: make("tr", {}, ...cells), cells, line };
  rows.set(vm.name, row);
  return row;
}

function drawSpark(name) {
  const [row, values] = [rows.get(name), state.sparks.get(name)];
  if (!row || !values) return;
  charts.spark(row.line, values, 100, values.at(-1) > WAITS ? "bad" : "resident");
  const most = Math.max(...values).toFixed(1);
  row.line.setAttribute("aria-label", `stall now ${values.at(-1).toFixed(1)} %, most ${most} %`);
}

function list() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const by = COLUMNS.find(([key]) => key === state.sort[0])[2];
  const shown = state.vms.filter((vm) => {
    const text = `${vm.name} ${vm.kind} ${vm.status} ${vm.class} ${why(vm)}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  shown.sort((a, b) => order(by(a), by(b)) * state.sort[1] || order(a.name, b.name));
  for (const vm of shown) {
    const row = rows.get(vm.name) ?? newRow(vm);
    const limit = kept(vm);
    const texts = [null, vm.kind, vm.status, size(vm.size_bytes), limit === null ? "-" : size(limit),
      size(vm.resident_bytes), size(vm.far_bytes), `${percent(vm).toFixed(1)} %`, null, why(vm)];
    texts.forEach((text, at) => { if (text !== null) put(row.cells[at], text); });
    const name = `${isBad(vm) ? "waits" : ""}${vm.name === state.chosen ? " chosen" : ""}`;
    if (row.node.className !== name) row.node.className = name;
    if (seen.get(row.line)) drawSpark(vm.name);
  }
  const names = new Set(state.vms.map((vm) => vm.name));
  for (const name of rows.keys()) if (!names.has(name)) rows.delete(name);
  const nodes = shown.map((vm) => rows.get(vm.name).node);
  const body = $("rows");
  const differs = nodes.length !== body.children.length || nodes.some((node, at) => body.children[at] !== node);
  if (differs) body.replaceChildren(...nodes);
  put($("count"), `${shown.length} of ${state.vms.length}`);
  $("none").hidden = shown.length > 0;
  put($("none"), state.vms.length ? "No VM matches." :
    "No VM is here yet. Start one with `ballast run -- qemu-system-x86_64 …`, or adopt those that run: " +
    "`ballast adopt --all`.");
}

// ---- the host ----

const columns = (history) => ({
  at: history.at_unix_s, size: history.size_bytes, resident: history.resident_bytes, far: history.far_bytes,
  zero: history.zero_bytes, limit: history.limit_bytes, other: history.other_bytes, store: history.store_bytes,
  stall: history.stall_permille.map((part) => part / 10), restores: history.restores_per_s,
});

const MARKED = new Set(["host-state", "policy", "overcommitted", "engine-replaced", "store-full"]);
const hostChart = new charts.Chart($("host-chart"), [
  { name: "resident", column: "resident", color: "resident", stacks: true },
  { name: "far", column: "far", color: "far", stacks: true },
  { name: "zero", column: "zero", color: "zero", stacks: true },
], { marks: () => state.events.filter((event) => MARKED.has(event.kind)).map((event) => event.at_unix_ms / 1000) });

const dramChart = new charts.Chart($("dram-chart"), [
  { name: "DRAM available", column: "other", color: "other" },
  { name: "store (compressed far pages)", column: "store", color: "store", dash: [6, 4] },
], { tall: 110 });

function few(history) {
  return history.at_unix_s.length < 2 ? " The charts begin within half a minute after ballastd has started." : "";
}

async function showHost() {
  const history = await ask(`/v1/history?minutes=${$("span").value}`);
  const { host } = state;
  if (history.at_unix_s.length) {
    hostChart.show(columns(history));
    dramChart.show(columns(history));
  }
  const saved = `${size(host.saved_bytes)} of DRAM saved`;
  put($("host-text"), `Guest RAM ${size(host.size_bytes)}: ${size(host.resident_bytes)} resident, ` +
    `${size(host.far_bytes)} far, ${size(host.zero_bytes)} zero; ${saved}. ` +
    `DRAM: ${size(host.mem_available_bytes)} of ${size(host.mem_total_bytes)} available. ` +
    `Store: ${size(host.store_bytes)} of ${size(host.store_budget_bytes)}. ` +
    `Dashed lines: changes of the host's state and of the policy.${few(history)}`);
}

function showWaiting() {
  const waiting = state.vms.filter(isBad);
  waiting.sort((a, b) => percent(b) - percent(a));
  const { host } = state;
  const more = waiting.length > WAITING_SHOWN ? [`and ${waiting.length - WAITING_SHOWN} more VMs`] : [];
  fill($("waiting"), [...(host.warnings ?? []),
    ...waiting.slice(0, WAITING_SHOWN).map((vm) => `${vm.name}: ${why(vm)}`), ...more].map((text) => [null, text]));
  const word = host.state ? `Free memory of the host: ${host.state}. ` : "";
  put($("host-state"), `${word}Policy: ${host.policy}.${state.note}`);
  put($("summary"), `${host.vms} ${host.vms === 1 ? "VM" : "VMs"} · ` +
    `${size(host.resident_bytes)} resident · ${size(host.far_bytes)} far · ` +
    `ballast ${host.version}, engine ${host.engine_epoch}`);
}

// ---- one VM ----

const vmChart = new charts.Chart($("vm-chart"), [
  { name: "resident", column: "resident", color: "resident", stacks: true },
  { name: "far", column: "far", color: "far", stacks: true },
  { name: "zero", column: "zero", color: "zero", stacks: true },
  { name: "limit", column: "limit", color: "limit" },
  { name: "working set", column: "other", color: "other", dash: [6, 4] },
]);
const stallChart = new charts.Chart($("stall-chart"), [{ name: "stall", column: "stall", color: "bad" }],
  { format: (value) => `${(value ?? 0).toFixed(1)} %`, top: 1, tall: 100 });

function choose(name) {
  state.chosen = name;
  state.heat = [];
  location.hash = name ? `vm=${encodeURIComponent(name)}` : "";
  $("vm").hidden = !name;
  list();
  if (!name) return;
  put($("vm-title"), name);
  $("vm-title").focus();
  showVm().catch(() => {});
}

function close() {
  const row = rows.get(state.chosen);
  choose(null);
  if (row) row.cells[0].firstChild.focus();
}

function where(vm) {
  const elsewhere = vm.far_file_bytes + vm.far_remote_bytes;
  const parts = [["resident", vm.resident_bytes, "resident"], ["far", vm.far_bytes, "far"],
    ["zero", vm.zero_bytes, "zero"], ["untouched", vm.untouched_bytes, "untouched"],
    ["lost", vm.poisoned_bytes, "poisoned"]];
  $("where").replaceChildren(...parts.filter(([, bytes]) => bytes > 0).map(([, bytes, word]) => {
    const part = make("span");
    part.style.background = `var(--${word})`;
    part.style.flexGrow = bytes;
    return part;
  }));
  $("where").setAttribute("aria-label", parts.map(([name, bytes]) => `${name} ${size(bytes)}`).join(", "));
  const more = vm.kind === "adopted" ? [["moved by", "the kernel's swap"]] : [
    ["far, in RAM (compressed)", `${size(vm.far_bytes - elsewhere)} in ${size(vm.store_bytes)}`],
    ["far, in a file", size(vm.far_file_bytes)], ["far, in a cluster", size(vm.far_remote_bytes)],
    ["in quarantine", size(vm.quarantine_bytes)], ["pinned by a device", size(vm.pinned_pages * 4096)]];
  const shown = parts.filter(([name, bytes]) => bytes > 0 || name !== "lost");
  pairs($("where-list"), [...shown.map(([name, bytes, word]) => [name, size(bytes), word]), ...more]);
}

async function showHeat(vm) {
  const heat = await ask(`/v1/vms/${encodeURIComponent(vm.name)}/heat?cells=96`);
  const canvas = $("heat");
  canvas.hidden = !heat.is_tracked || heat.cycles === 0;
  if (canvas.hidden) {
    put($("heat-text"), vm.kind === "adopted" ? "The kernel does not say how old an adopted VM's pages are." :
      `Nobody tracks ${vm.name}: \`ballast vm heat ${vm.name} --track on\` does, for some percent of its speed.`);
    return;
  }
  const last = state.heat.at(-1);
  if (!last || Date.now() - last.at >= 4000) state.heat.push({ at: Date.now(), strip: heat.strip });
  charts.heat(canvas, state.heat);
  const settling = heat.cycles < 6 ? ` Settling: after ${heat.cycles} cycles the working set is too small.` : "";
  const since = `${clock(state.heat[0].at / 1000)} to ${clock(Date.now() / 1000)}`;
  const text = `${vm.name}, ${since}, addresses from top to bottom; bright: touched within 2 s, ` +
    `dark: not for 10 minutes. Working set ${size(heat.wss_bytes)} ` +
    `(touched within ${heat.wss_span_s.toFixed(0)} s).${settling}`;
  put($("heat-text"), text);
  canvas.setAttribute("aria-label", text);
}

async function showVm() {
  const vm = state.vms.find((one) => one.name === state.chosen);
  if (!vm) {
    put($("vm-why"), "This VM is gone.");
    return;
  }
  put($("vm-why"), why(vm) || "It runs and does not wait.");
  $("vm-why").className = isBad(vm) ? "bad" : "";
  where(vm);
  const name = encodeURIComponent(vm.name);
  const [history, decisions] = await Promise.all([ask(`/v1/vms/${name}/history?minutes=${$("span").value}`),
    ask(`/v1/vms/${name}/decisions`)]);
  if (state.chosen !== vm.name) return;
  if (history.at_unix_s.length) {
    vmChart.show(columns(history));
    stallChart.show(columns(history));
  }
  const limit = kept(vm);
  const named = (bytes) => (bytes === null ? "none" : size(bytes));
  put($("vm-text"), `${size(vm.size_bytes)} of RAM: ${size(vm.resident_bytes)} resident; limit ${named(limit)} ` +
    `(an operator's: ${named(vm.limit_bytes)}, the policy's: ${named(vm.target_bytes)}).${few(history)}`);
  put($("stall-text"), `Stall: part of the time for which it waits for far memory; now ${percent(vm).toFixed(1)} %.`);
  const words = decisions.slice(-3).reverse().flatMap((one) =>
    one.sentences.map((text) => [new Date(one.last_unix_ms).toLocaleTimeString("en-GB"), text]));
  const free = vm.limit_bytes === null ? "it may use all its memory" : "its operator set the limit";
  const none = `No policy has decided about it; ${free}.`;
  fill($("decisions"), words.length ? words : [[null, none]]);
  const { faults } = vm;
  const count = (number) => number.toLocaleString("en-GB");
  pairs($("faults"), [["restored from a store", count(faults.restore)],
    ["of these, from a disk or cluster", count(faults.file)], ["in memory, not mapped", count(faults.minor)],
    ["zero", count(faults.zero)], ["first touch", count(faults.fresh)],
    ["waited at the limit", `${count(faults.throttled)}, ${(faults.throttled_us / 1e6).toFixed(1)} s`]]);
  fill($("vm-events"), eventTexts(state.events.filter((event) => event.vm === vm.name)).slice(0, 20));
  await showHeat(vm);
}

$("limit-form").addEventListener("submit", async (submit) => {
  submit.preventDefault();
  const text = $("limit-input").value.trim();
  const parts = /^(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?$/i.exec(text);
  if (text !== "none" && !parts) return put($("limit-answer"), "Write a size such as 4G, or none.");
  const power = { "": 0, K: 1, M: 2, G: 3, T: 4 };
  const limit_bytes = text === "none" ? null : Math.round(parts[1] * 1024 ** power[parts[2].toUpperCase()]);
  try {
    const vm = await change(`/v1/vms/${encodeURIComponent(state.chosen)}`, { limit_bytes });
    put($("limit-answer"), `Set: ${vm.limit_bytes === null ? "no limit" : size(vm.limit_bytes)}.`);
  } catch (error) {
    put($("limit-answer"), `Refused: ${error.message ?? error}`);
  }
});

// ---- events ----

const eventTexts = (events) => events.slice(-EVENTS_SHOWN).reverse().map((event) =>
  [stamp(event.at_unix_ms), `${event.vm ? `${event.vm}: ` : ""}${event.kind}: ${event.message}`]);

async function readEvents() {
  const more = await ask(`/v1/events?after=${state.lastEvent}`);
  if (!more.length) return;
  state.events = [...state.events, ...more].slice(-1000);
  state.lastEvent = more.at(-1).id;
  fill($("event-list"), eventTexts(state.events));
}

// ---- the loop ----

async function begin() {
  const all = await ask("/v1/history/vms?minutes=10");
  for (const { name, history } of all) state.sparks.set(name, history.stall_permille.map((part) => part / 10));
}

async function tick() {
  const [host, vms] = await Promise.all([ask("/v1/host"), ask("/v1/vms")]);
  if (state.epoch !== null && host.engine_epoch !== state.epoch)
    state.note = ` Another engine serves since ${new Date().toLocaleTimeString("en-GB")}.`;
  Object.assign(state, { host, vms, epoch: host.engine_epoch });
  if (!state.sparks.size && vms.length) await begin();
  for (const vm of vms) {
    const line = state.sparks.get(vm.name) ?? [];
    line.push(percent(vm));
    state.sparks.set(vm.name, line.slice(-SPARKS));
  }
  await readEvents();
  const start = performance.now();
  showWaiting();
  list();
  document.body.dataset.updateMs = (performance.now() - start).toFixed(1);
  await showHost();
  // A VM may end between two requests; that is no failure of the daemon.
  if (state.chosen) await showVm().catch((error) => put($("vm-why"), `Its figures did not come: ${error.message}`));
  document.body.dataset.ready = "1";
}

async function loop() {
  if (!document.hidden) {
    try {
      await tick();
      if (state.failedAt) $("banner").hidden = true;
      document.body.classList.remove("old");
      state.failedAt = null;
    } catch (error) {
      state.failedAt ??= Date.now();
      const old = state.host ? " What is shown is from before." : "";
      put($("banner"), `ballastd does not answer since ${new Date(state.failedAt).toLocaleTimeString("en-GB")}: ` +
        "VMs run on, no memory is lost, and VMs that touch far memory wait until it does " +
        "(`systemctl status ballastd`)." +
        `${old} ${error.message ?? error.problem ?? error}`);
      $("banner").hidden = false;
      document.body.classList.add("old");
    }
  }
  setTimeout(loop, state.vms.length > MANY ? MANY_MS : FAST_MS);
}

$("search").addEventListener("input", list);
$("span").addEventListener("change", () => {
  showHost().catch(() => {});
  if (state.chosen) showVm().catch(() => {});
});
$("close").addEventListener("click", close);
document.addEventListener("keydown", (key) => {
  if (key.key === "Escape" && state.chosen) close();
  if (key.key === "/" && document.activeElement.tagName !== "INPUT") { key.preventDefault(); $("search").focus(); }
});
$("limit-form").hidden = !bridge;
heads();
const named = new URLSearchParams(location.hash.slice(1)).get("vm");
if (named) { state.chosen = named; $("vm").hidden = false; put($("vm-title"), named); }
loop();
