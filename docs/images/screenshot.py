"""Take a picture of `ddpjob ui` with Chromium, over a folder of local runs.

python docs/images/screenshot.py ddpjob-runs digits docs/images/ui.png
"""

import subprocess
import sys

SIZE = "1000,1180"

# Milliseconds of the browser's own clock, in which the curves are loaded.
CLOCK = 2000


def main() -> None:
    runs, job, picture = sys.argv[1:]
    command = [sys.executable, "-m", "ddpjob.cli.main", "ui", "--runs", runs, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pages:
        assert pages.stdout
        address, token = pages.stdout.readline().split()[-1].split("/?")
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        browser += [f"--window-size={SIZE}", f"--virtual-time-budget={CLOCK}"]
        browser += [f"--screenshot={picture}", f"{address}/jobs/-/{job}?{token}"]
        subprocess.run(browser, check=True)
        pages.terminate()


if __name__ == "__main__":
    main()
