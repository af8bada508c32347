// Load the page again every few seconds, and show what has changed. A hidden page waits.
const SECONDS = 3;

async function refresh() {
  let problem = "";
  try {
    const answer = await fetch(location.href);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (page.querySelector("main section")) {
      document.title = page.title;
      show(page);
    } else {
      problem = answer.status === 403
        ? "ddpjob ui was started again: open the address that it has printed."
        : (page.querySelector("main") ?? page.body).textContent.trim();
    }
  } catch {
    problem = "No answer: ddpjob ui has ended, or the network is down.";
  }
  document.getElementById("problem").textContent = problem;
}

// Replace each part that has changed, unless somebody selects text in it.
function show(page) {
  const selection = getSelection();
  for (const part of document.querySelectorAll("main > [id]")) {
    const found = page.getElementById(part.id);
    const isSelected = !selection.isCollapsed && selection.containsNode(part, true);
    if (!found || isSelected || part.innerHTML === found.innerHTML) continue;
    const isAtEnd = part.scrollTop + part.clientHeight >= part.scrollHeight - 4;
    part.innerHTML = found.innerHTML;
    if (isAtEnd) part.scrollTop = part.scrollHeight;
  }
}

// The next request is sent after the answer to the last one.
async function repeat() {
  if (!document.hidden) await refresh();
  setTimeout(repeat, SECONDS * 1000);
}

const log = document.getElementById("log");
if (log) log.scrollTop = log.scrollHeight;
setTimeout(repeat, SECONDS * 1000);
