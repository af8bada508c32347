// Load the page again every few seconds, and show what has changed. A hidden page waits.
const SECONDS = 3;

async function refresh() {
  const connection = document.getElementById("connection");
  try {
    const answer = await fetch(location.href);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const found = page.querySelector("main");
    if (!found) throw new Error(`status ${answer.status}`);
    connection.textContent = "";
    document.title = page.title;
    replace(document.querySelector("main"), found);
  } catch {
    connection.textContent = "No answer: ddpjob ui has ended, or the network is down.";
  }
}

function replace(shown, found) {
  if (shown.innerHTML === found.innerHTML) return;
  const old = document.getElementById("log");
  const isAtEnd = old && old.scrollTop + old.clientHeight >= old.scrollHeight - 4;
  const place = old ? old.scrollTop : 0;
  shown.replaceWith(found);
  const log = document.getElementById("log");
  if (log) log.scrollTop = isAtEnd ? log.scrollHeight : place;
}

const log = document.getElementById("log");
if (log) log.scrollTop = log.scrollHeight;
setInterval(() => document.hidden || refresh(), SECONDS * 1000);
