"""The README's pictures of the terminal and of the report: `make screenshots`. It needs chromium.

It runs `covary compare` in a terminal, and takes a picture half way through and at the end.
"""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyte
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 108, 26
IMAGES = Path(__file__).parent / "images"
CHROMIUM = shutil.which("chromium")


def picture(screen: pyte.Screen) -> list[Text]:
    """The lines of a terminal with their colours."""
    lines = []
    for y in range(screen.lines):
        line = Text()
        for x in range(screen.columns):
            cell = screen.buffer[y][x]
            colour = "" if cell.fg == "default" else f"#{cell.fg}" if len(cell.fg) == 6 else cell.fg
            line.append(cell.data, f"{'bold ' if cell.bold else ''}{colour}".strip() or None)
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def watched(command: list[str], folder: Path) -> tuple[list[Text], list[Text]]:
    """The screen of a command half way through and at the end."""
    ours, theirs = pty.openpty()
    screen = pyte.Screen(WIDTH, HEIGHT)
    stream, middle = pyte.ByteStream(screen), []
    environment = {**os.environ, "COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                stream.feed(terminal.read(65536))
            except OSError:  # the command is done
                break
            shown = picture(screen)
            if len(shown) > 1 and "cells" in shown[0].plain and "accuracy" in shown[1].plain:
                middle = shown
    assert process.wait() == 0
    return middle, picture(screen)


def save(page: Page, lines: list[Text], path: Path) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    fonts = console.export_svg(title="covary").replace("Fira Code", "DejaVu Sans Mono")
    page.set_content(f"<body style='margin:0;width:1100px'>{fonts}</body>")
    page.locator("svg").first.screenshot(path=path)


def main() -> None:
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        folder = Path(made)
        prompt = Text.assemble(("$ ", "bold green"), "covary compare")
        middle, end = watched([str(Path(sys.executable).parent / "covary"), "compare"], folder)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5)
        save(page, [prompt, *middle, Text("  ..."), Text(), *end], IMAGES / "terminal.png")
        (report,) = folder.glob("runs/*/report.html")
        page.goto(report.as_uri())
        page.set_viewport_size({"width": 1280, "height": 1500})
        page.wait_for_timeout(300)
        page.screenshot(path=IMAGES / "report.png")
        (curves,) = folder.glob("runs/*/curves.png")
        (IMAGES / "compare.png").write_bytes(curves.read_bytes())
        browser.close()


if __name__ == "__main__":
    main()
