"""`make deploy-demo`: three nodes behind a gate on this machine, with TLS and keys.

They train a PyTorch model on handwritten digits sorted by label, so that each node has only a few of the digits. After
some rounds the gate rejects an outsider who has the CA certificate. Then one node is killed, as in a power failure, and
started again. At the end the control variates on all disks are audited. The exit code is 0 if the run completed all
rounds.
"""

import subprocess
import sys
import time
from pathlib import Path

from covary.flower import audit, outcome
from covary.flower.local import Federation, connection
from covary.flower.template import write_app
from covary.runs.files import File

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
NODES = ("hospital-a", "hospital-b", "hospital-c")


def outsider(here, home):
    """Attempts of someone with ca.crt at the gate: the name of each, and whether the gate rejected it."""
    home.mkdir()
    (home / "config.toml").write_text(connection("gate", here.gate_port, here.folder / "ca.crt"))
    for what, words in {
        "see the nodes": ["supernode", "list"],
        "register a node": ["supernode", "register", str(here.key(NODES[0]).with_suffix(".pub"))],
        "see the runs": ["list"],
    }.items():
        command = [str(here.bin / "flwr"), *words, "gate"]
        env = {**here.environment, "FLWR_HOME": str(home)}
        done = subprocess.run(command, env=env, capture_output=True, timeout=60)
        yield what, done.returncode != 0


def main():
    folder = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-deploy-demo"
    folder.mkdir(parents=True)
    checkpoint = folder.absolute() / "checkpoint"
    write_app(folder / "demo", with_torch=True)
    print(f"`covary new-app demo --torch` wrote a Flower app to {folder / 'demo'}.")
    with Federation(folder / "machines", [folder / "demo"]) as here:
        print("A SuperLink runs behind nginx as its gate. Three nodes register their keys and connect: `covary node`.")
        for number, name in enumerate(NODES):
            here.register(name)
            here.start_node(name, {"partition-id": number})
        shown = 0

        def follow(until):
            """Print the server's log until a condition holds."""
            nonlocal shown
            while True:
                ended = here.processes["run"].poll() is not None
                lines = here.log("run").split("\n")[shown:-1]
                shown += len(lines)
                for line in lines:
                    if line and "INFO" not in line:
                        print(f"  server: {line}", flush=True)
                if until() or ended:
                    return
                time.sleep(0.2)

        def rounds_done():
            found = File(checkpoint / "ledger").read()
            return 0 if found is None else found[1]["round"]

        settings = {"rounds": ROUNDS, "eval-every": max(1, ROUNDS // 2), "round-timeout": 30.0}
        here.run(folder / "demo", {**settings, "checkpoint": str(checkpoint)})
        follow(lambda: rounds_done() >= max(1, ROUNDS // 3))
        if here.processes["run"].poll() is not None:
            return 1
        tried = dict(outsider(here, folder / "outsider"))
        for what, rejected in tried.items():
            print(f"An outsider with ca.crt tries to {what}: {'rejected by the gate' if rejected else 'LET IN'}.")
        print("hospital-b loses power (SIGKILL).")
        here.kill("hospital-b")
        here.start_node("hospital-b", {"partition-id": 1})
        print("It is restarted until the SuperLink has noticed that it was gone, and admits it.")
        here.wait_for_node("hospital-b")
        print("hospital-b is back, with the control variate on its disk.")
        follow(lambda: False)
    ended = outcome(checkpoint)
    print(f"\n{ended}")
    found = audit(checkpoint, [here.state(name) for name in NODES])
    print(f"\nThe disks after round {found.round} (epoch {found.epoch}), {found.members} members:")
    for name, norm in found.norms.items():
        print(f"  member {name}: ‖c_i‖ = {norm:.4f}")
    print(f"  server: ‖c‖ = {found.norm:.4f}, ‖c - mean c_i‖ = {found.gap:.1e}")
    print("c = mean(c_i) holds." if found.holds else "c = mean(c_i) DOES NOT HOLD.")
    return 0 if ended.reached and found.holds and all(tried.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
