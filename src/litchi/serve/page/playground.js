"use strict";
// What people type and what the server says becomes text nodes, never HTML.

const WORDS = {
  en: {
    otherLanguage: "中文: switch to Chinese", key: "API key", useKey: "Use this key", rank: "Rank", query: "Query",
    queryHint: "red striped dress", queryPicture: "Picture of the query", rankNow: "Rank", document: "Document",
    documentHint: "Type a text, or drop or paste pictures and texts here", add: "Add text", pictures: "Add pictures",
    demo: "Demo catalogue", clear: "Remove all", chat: "Chat", prompt: "Message", chatPicture: "Picture", send: "Send",
    stop: "Stop", remove: "Remove", picture: "picture", ranking: "Ranking …", score: "score", you: "You",
    none: "Add a document first.", empty: "Type a query or choose a picture.",
    took: (n, ms) => `${n} documents in ${ms} ms`, unreached: "The server cannot be reached",
    ranked: "Ranked.", notPicture: "is not a picture", answered: ms => `${ms} ms`,
    moved: (n, model) => `${Math.abs(n)} ${Math.abs(n) === 1 ? "place" : "places"} ${n > 0 ? "above" : "below"} ${model}'s`,
  },
  zh: {
    otherLanguage: "English: 切换到英文", key: "API 密钥", useKey: "使用此密钥", rank: "排序", query: "查询",
    queryHint: "红色条纹连衣裙", queryPicture: "查询图片", rankNow: "排序", document: "文档",
    documentHint: "输入文字，或把图片、文字拖放、粘贴到这里", add: "添加文字", pictures: "添加图片",
    demo: "示例目录", clear: "全部移除", chat: "对话", prompt: "消息", chatPicture: "图片", send: "发送",
    stop: "停止", remove: "移除", picture: "图片", ranking: "正在排序……", score: "得分", you: "你",
    none: "请先添加文档。", empty: "请输入查询或选择图片。",
    took: (n, ms) => `${n} 个文档，${ms} 毫秒`, unreached: "无法连接服务器",
    ranked: "已排序。", notPicture: "不是图片", answered: ms => `${ms} 毫秒`,
    moved: (n, model) => `比 ${model} 的名次${n > 0 ? "高" : "低"} ${Math.abs(n)} 位`,
  },
};
const at = id => document.getElementById(id);
const state = { language: "en", models: [], query: null, chat: null, documents: [], answers: null, asking: null };

function make(name, className, ...inside) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...inside);
  return node;
}
const say = name => WORDS[state.language][name];

// ---- Language: the browser's, until another was chosen

function setLanguage(language) {
  state.language = language;
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const node of document.querySelectorAll("[data-say]")) node.textContent = say(node.dataset.say);
  for (const node of document.querySelectorAll("[data-hint]")) node.placeholder = say(node.dataset.hint);
  for (const node of document.querySelectorAll("[data-label]")) node.setAttribute("aria-label", say(node.dataset.label));
  at("language").textContent = language === "zh" ? "English" : "中文";
  showTiles();
  showRanking();
}
function remembered() {
  try { return localStorage.getItem("language"); } catch { return null; }
}
at("language").addEventListener("click", () => {
  const other = state.language === "zh" ? "en" : "zh";
  try { localStorage.setItem("language", other); } catch { /* storage is switched off: not remembered */ }
  setLanguage(other);
});

// ---- The server

function tellProblem(text) {
  at("problem").hidden = !text;
  at("problem").textContent = text || "";
}
async function ask(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (at("key").value) headers.authorization = `Bearer ${at("key").value}`;
  let reply;
  try {
    reply = await fetch(path, body ? { method: "POST", headers, signal, body: JSON.stringify(body) } : { headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(say("unreached"));
  }
  if (reply.status === 401) at("key-form").hidden = false;
  if (!reply.ok) {
    const said = await reply.json().catch(() => null);
    throw new Error(said && said.error ? said.error.message : `HTTP ${reply.status}`);
  }
  return reply;
}
async function loadModels() {
  try {
    state.models = (await (await ask("v1/models")).json()).data;
  } catch (error) {
    tellProblem(error.message);
    return;
  }
  tellProblem();
  at("model").textContent = state.models.map(model => model.id).join(" · ");
  const can = task => state.models.some(model => !model.tasks || model.tasks.includes(task));
  at("rerank").hidden = !can("rerank");
  at("chat").hidden = !can("chat");
}
at("key-form").addEventListener("submit", event => { event.preventDefault(); loadModels(); });

// ---- Pictures and texts

function readPicture(file) {
  return new Promise((resolve, reject) => {
    if (!file.type.startsWith("image/")) { reject(new Error(`${file.name} ${say("notPicture")}`)); return; }
    const reader = new FileReader();
    reader.onload = () => resolve({ image: reader.result, name: file.name });
    reader.onerror = () => reject(new Error(`${file.name}: ${reader.error.message}`));
    reader.readAsDataURL(file);
  });
}
async function take(where, files, text) {
  try {
    const read = await Promise.all([...files].map(readPicture));
    tellProblem();
    if (where === "documents") state.documents.push(...read, ...(text ? [{ text }] : []));
    else if (read.length) state[where] = read[0];
    else if (text) at(where === "query" ? "query" : "prompt").value = text;
  } catch (error) { tellProblem(error.message); }
  showTiles();
}
function shown(item) {
  if (!item.image) return make("span", "text", item.text);
  const picture = make("img");
  picture.src = item.image;
  picture.alt = item.name || say("picture");
  return picture;
}
function tile(item, remove) {
  const button = make("button", "", "×");
  button.type = "button";
  button.setAttribute("aria-label", `${say("remove")}: ${item.name || item.text || say("picture")}`);
  button.addEventListener("click", () => { remove(); showTiles(); });
  return make("li", "", shown(item), button);
}
function showTiles() {
  at("documents").replaceChildren(...state.documents.map(
    item => tile(item, () => { state.documents = state.documents.filter(other => other !== item); })));
  for (const where of ["query", "chat"])
    at(`${where}-shown`).replaceChildren(...(state[where] ? [tile(state[where], () => { state[where] = null; })] : []));
}
for (const [id, where] of [["query-picture", "query"], ["pictures", "documents"], ["chat-picture", "chat"]])
  at(id).addEventListener("change", async event => { await take(where, event.target.files); event.target.value = ""; });
for (const zone of document.querySelectorAll(".drop")) {
  zone.addEventListener("dragover", event => { event.preventDefault(); zone.classList.add("over"); });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", event => {
    event.preventDefault();
    zone.classList.remove("over");
    const files = event.dataTransfer.files;
    take(zone.dataset.drop, files, files.length ? "" : event.dataTransfer.getData("text/plain"));
  });
  zone.addEventListener("paste", event => {  // a text goes where the cursor is
    if (event.clipboardData.files.length) { event.preventDefault(); take(zone.dataset.drop, event.clipboardData.files); }
  });
}
at("document-form").addEventListener("submit", event => {
  event.preventDefault();
  take("documents", [], at("text").value.trim());
  at("text").value = "";
  at("text").focus();
});
at("clear").addEventListener("click", () => { state.documents = []; state.answers = null; showTiles(); showRanking(); });
at("demo").addEventListener("click", async () => {
  try {
    const demo = await (await ask("page/catalogue.json")).json();
    state.documents = demo.documents;
    if (!at("query").value && !state.query) at("query").value = demo.query[state.language];
    tellProblem();
  } catch (error) { tellProblem(error.message); }
  showTiles();
});

// ---- Ranking

const plain = item => (item.image ? { image: item.image } : item.text);

at("rank-form").addEventListener("submit", async event => {
  event.preventDefault();
  const text = at("query").value.trim(), documents = [...state.documents];
  if (!documents.length) { tellProblem(say("none")); return; }
  if (!text && !state.query) { tellProblem(say("empty")); return; }
  const query = state.query ? { ...(text && { text }), image: state.query.image } : text;
  tellProblem();
  at("status").textContent = say("ranking");
  const mine = state.asking = {};
  const models = state.models.filter(model => !model.tasks || model.tasks.includes("rerank"));
  try {
    const answers = [];
    for (const model of models) {  // one after the other, so that neither makes the other slower
      const began = performance.now();
      const reply = await (await ask("v1/rerank", { model: model.id, query, documents: documents.map(plain) })).json();
      answers.push({ model: model.id, results: reply.results, documents, ms: Math.round(performance.now() - began) });
    }
    if (mine !== state.asking) return;  // a later ranking has been asked for
    state.answers = answers;
    at("status").textContent = say("ranked");
  } catch (error) {
    if (mine !== state.asking) return;
    at("status").textContent = "";
    tellProblem(error.message);
  }
  showRanking();
});
// With a second model beside it: how many places higher the first one has a document.
function moved(result, place) {
  const [, base] = state.answers;
  const up = base.results.findIndex(other => other.index === result.index) - place;
  if (!up) return [];
  const mark = make("span", "moved", `${up > 0 ? "▲" : "▼"} ${Math.abs(up)}`);
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", say("moved")(up, base.model));
  return [mark];
}
function showRanking() {
  at("results").replaceChildren(...(state.answers || []).map((answer, number, all) => {
    const logits = answer.results.map(result => result.logit), low = Math.min(...logits), high = Math.max(...logits);
    const list = make("ol", "ranked", ...answer.results.map((result, place) => {
      const bar = make("div", "bar"), score = result.relevance_score;
      bar.style.width = `${high > low ? 2 + 98 * (result.logit - low) / (high - low) : 100}%`;  // scores may all be near 0
      const shownScore = score < 0.001 ? score.toExponential(1) : score.toFixed(3);
      const said = make("span", "", `${say("score")} ${shownScore} (${result.logit.toFixed(2)})`);
      const numbers = make("div", "score", said, ...(all.length === 2 && !number ? moved(result, place) : []));
      return make("li", "", shown(answer.documents[result.index]), make("div", "", numbers, make("div", "track", bar)));
    }));
    const took = make("p", "quiet", say("took")(answer.results.length, answer.ms));
    return make("article", "card", make("h3", "", answer.model), took, list);
  }));
}

// ---- Chat

let stopper = null;
at("stop").addEventListener("click", () => stopper && stopper.abort());
at("chat-form").addEventListener("submit", async event => {
  event.preventDefault();
  const text = at("prompt").value.trim(), picture = state.chat;
  if (!text || stopper) return;
  tellProblem();
  const content = [...(picture ? [{ type: "image_url", image_url: { url: picture.image } }] : []), { type: "text", text }];
  const asked = make("article", "card", make("h3", "", say("you")), ...(picture ? [shown(picture)] : []));
  asked.append(make("div", "text", text));
  at("answers").append(asked);
  at("stop").disabled = false;
  stopper = new AbortController();
  try {
    for (const model of state.models.filter(model => !model.tasks || model.tasks.includes("chat"))) {
      const answer = make("div", "text"), took = make("p", "quiet"), began = performance.now();
      at("answers").append(make("article", "card", make("h3", "", model.id), answer, took));
      const body = { model: model.id, stream: true, messages: [{ role: "user", content }] };
      await readEvents(await ask("v1/chat/completions", body, stopper.signal), piece => answer.append(piece));
      took.textContent = say("answered")(Math.round(performance.now() - began));
    }
    at("prompt").value = "";
  } catch (error) { if (error.name !== "AbortError") tellProblem(error.message); }
  stopper = null;
  at("stop").disabled = true;
});
async function readEvents(reply, show) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const said = JSON.parse(line.slice(6));
      if (said.error) throw new Error(said.error.message);
      for (const choice of said.choices) if (choice.delta.content) show(choice.delta.content);
    }
  }
}

setLanguage(remembered() || ((navigator.language || "").startsWith("zh") ? "zh" : "en"));
loadModels();
