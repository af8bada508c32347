"""Draw the diagrams of the documentation as SVG: a job's life, an attempt, and a pod.

    python docs/images/diagrams.py

A box is (x, y, text) in units of a grid. The first line of its text is bold.
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent

UNIT = 10
WIDTH, LINE, PAD = 150, 17, 9
INK, PAPER, FILL, ACCENT = "#1b2a3a", "#ffffff", "#eaf1f8", "#1f4e79"


class Drawing:
    """Boxes with names, and arrows between them."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.size = width * UNIT, height * UNIT
        self.title = title
        self.boxes: dict[str, tuple[float, float, float, float]] = {}
        self.parts: list[str] = []

    def box(self, name: str, x: float, y: float, text: str, width: float = WIDTH) -> None:
        lines = text.split("\n")
        x, y = x * UNIT, y * UNIT
        height = 2 * PAD + LINE * len(lines) - 4
        self.boxes[name] = x, y, width, height
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{FILL}" '
            f'stroke="{ACCENT}"/>'
        )
        for number, line in enumerate(lines):
            weight = "bold" if number == 0 else "normal"
            place = y + PAD + LINE * (number + 0.7)
            self.text(x + width / 2, place, line, weight=weight)

    def text(
        self, x: float, y: float, text: str, *, weight: str = "normal", size: int = 12
    ) -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="middle" font-weight="{weight}" '
            f'font-size="{size}" fill="{INK}">{escape(text)}</text>'
        )

    def arrow(self, start: str, end: str, text: str = "", *, bend: float = 0) -> None:
        """Draw an arrow between the sides of two boxes that face each other."""
        (x1, y1), (x2, y2) = self._sides(self.boxes[start], self.boxes[end])
        cx, cy = (x1 + x2) / 2, (y1 + y2) / 2
        if abs(x2 - x1) > abs(y2 - y1):
            cy += bend * UNIT
        else:
            cx += bend * UNIT
        self.parts.append(
            f'<path d="M {x1} {y1} Q {cx} {cy} {x2} {y2}" fill="none" stroke="{INK}" '
            'marker-end="url(#head)"/>'
        )
        middle = (x1 + 2 * cx + x2) / 4, (y1 + 2 * cy + y2) / 4 - 5
        for number, line in enumerate(filter(None, text.split("\n"))):
            self.text(middle[0], middle[1] + 14 * number, line, size=11)

    @staticmethod
    def _sides(one, other):
        (x1, y1, w1, h1), (x2, y2, w2, h2) = one, other
        if x1 + w1 <= x2:
            return (x1 + w1, y1 + h1 / 2), (x2 - 3, y2 + h2 / 2)
        if x2 + w2 <= x1:
            return (x1, y1 + h1 / 2), (x2 + w2 + 3, y2 + h2 / 2)
        if y1 < y2:
            return (x1 + w1 / 2, y1 + h1), (x2 + w2 / 2, y2 - 3)
        return (x1 + w1 / 2, y1), (x2 + w2 / 2, y2 + h2 + 3)

    def save(self, name: str) -> None:
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/>'
            "</marker></defs>"
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            head,
            *self.parts,
            "</svg>",
        ]
        (FOLDER / name).write_text("\n".join(lines) + "\n")


def job_life() -> None:
    drawing = Drawing("The phases of a DDPJob", 98, 40)
    drawing.box("pending", 2, 4, "Pending\nno room, no image,\na quota, a queue")
    drawing.box("starting", 28, 4, "Starting\ncontainers start,\nranks meet")
    drawing.box("running", 54, 4, "Running\nall ranks have met")
    drawing.box("complete", 80, 4, "Complete\nresult in the status")
    drawing.box("restarting", 41, 20, "Restarting\nattempt + 1")
    drawing.box("failed", 80, 20, "Failed\nthe budget is used up,\na deadline, wrong use")
    drawing.box("suspended", 2, 20, "Suspended\nspec.suspend, no pods")
    drawing.arrow("pending", "starting", "pods run")
    drawing.arrow("starting", "running", "all ready")
    drawing.arrow("running", "complete", "all end with 0")
    drawing.arrow(
        "running", "restarting", "a rank fails, a pod is lost,\nit hangs, nodes change", bend=9
    )
    drawing.arrow("restarting", "starting", "survivors stay,\nlost pods are made anew", bend=-9)
    drawing.arrow("restarting", "failed", "no restart is left")
    drawing.arrow("suspended", "pending", "resume", bend=-4)
    drawing.text(
        490,
        330,
        "From each phase: suspend ends the pods with their grace period. Deleting",
        size=11,
    )
    drawing.text(490, 346, "the job removes its pods. Checkpoints stay in both cases.", size=11)
    drawing.save("job-life.svg")


def attempt() -> None:
    drawing = Drawing("One attempt of a DDPJob with two nodes", 98, 44)
    drawing.box("operator", 40, 2, "operator\nobserve, decide, act", 180)
    drawing.box("pod0", 4, 16, "pod JOB-0-0\nagent\ntorchrun\nrank 0, rank 1", 200)
    drawing.box("pod1", 74, 16, "pod JOB-0-1\nagent\ntorchrun\nrank 2, rank 3", 200)
    drawing.box("claim", 40, 34, "claim\ncheckpoints of all attempts", 180)
    drawing.arrow("operator", "pod0", "1 create all pods at once,\nwith the assignment", bend=-3)
    drawing.arrow("operator", "pod1", "2 readiness and the\ntermination message", bend=-3)
    drawing.arrow("pod0", "pod1", "rendezvous at node 0, then all-reduce")
    drawing.arrow("pod0", "claim", "rank 0 writes", bend=3)
    drawing.arrow("pod1", "claim", "all read", bend=3)
    drawing.save("attempt.svg")


def pod() -> None:
    drawing = Drawing("A pod of a DDPJob", 98, 42)
    drawing.box("assignment", 2, 4, "assignment\nfile from an annotation", 190)
    drawing.box("agent", 38, 4, "agent, process 1\nstandard-library Python", 200)
    drawing.box("port", 76, 4, "port 29401\n/ready and /metrics", 190)
    drawing.box("zygote", 38, 16, "zygote (fastStart)\nhas imported torch", 200)
    drawing.box("torchrun", 38, 27, "torchrun", 200)
    drawing.box("rank0", 14, 34, "rank 0\nyour script", 160)
    drawing.box("rank1", 68, 34, "rank 1\nyour script", 160)
    drawing.box("report", 76, 16, "termination message\ncause, rank, exception", 190)
    drawing.arrow("assignment", "agent", "read")
    drawing.arrow("agent", "port", "serve")
    drawing.arrow("agent", "zygote", "start")
    drawing.arrow("zygote", "torchrun", "fork")
    drawing.arrow("torchrun", "rank0", "start", bend=-1)
    drawing.arrow("torchrun", "rank1", "start", bend=-1)
    drawing.arrow("agent", "report", "at the end", bend=-2)
    drawing.save("pod.svg")


if __name__ == "__main__":
    job_life()
    attempt()
    pod()
