"""The output of all commands, for people and for programs."""

import json
import os
import pty
import re
import subprocess
import sys

import click
import pytest
import typer
from helpers import covary, covary_process

from covary.cli import app

RUN = ("run", "scaffold", "--rounds", "6", "--clients", "5")


def commands(group, path=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group) or hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))
SERVICES = {("node",)}  # they run until they are stopped, and have no result to print


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_json_output_and_an_example(path):
    options = {name for parameter in COMMANDS[path].params for name in parameter.opts}
    assert {"--json", "--quiet"} <= options or path in SERVICES
    assert f"Example: covary {' '.join(path)}" in COMMANDS[path].help


def test_json_is_one_object_and_progress_is_beside_it(tmp_path):
    done = covary(*RUN, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["rounds"], answer["reached"], answer["diverged"]) == (6, None, None)
    assert (tmp_path / answer["report"]).is_file()
    lines = done.stderr.splitlines()
    assert lines[0] == "preparing"
    assert re.fullmatch(r"scaffold  accuracy 0\.\d+  loss \d\.\d+: 6 of 6 rounds(, .* rounds/s)?", lines[-1])
    assert "Warning" not in done.stderr


def test_quiet_is_quiet_but_for_errors(tmp_path):
    done = covary(*RUN, "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    refused = covary_process("run", "nonsense", "--quiet", "--json", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("Error: ALGORITHM must be one of")


def test_a_terminal_gets_a_bar_with_the_metric_the_speed_and_the_time_left(tmp_path):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "140", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "covary", "run", "fedavg", "--rounds", "600", "--clients", "5"],
        cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    with os.fdopen(ours, "rb", buffering=0) as screen:
        while True:
            try:
                part = screen.read(65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert re.search(r"fedavg  accuracy 0\.\d+  loss .*/600 rounds [\d,.e+]+/s", text)


def test_the_shell_completes_algorithms_data_sets_and_experiments(tmp_path):
    for words, wanted in (("covary run sc", "scaffold"), ("covary reproduce t", "table3"), ("covary di", "diagnose")):
        environment = os.environ | {
            "_COVARY_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        script = "from covary.cli import app; app(prog_name='covary')"
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert wanted in done.stdout.split(), done.stderr
