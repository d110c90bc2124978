"""`make deploy-demo`: three nodes behind a gate on this machine, with TLS and keys, an outsider, and a node that dies.

They train a PyTorch model on handwritten digits sorted by label, so that each node has its own few of them. After some
rounds an outsider with the CA's certificate is refused, and one node is killed, as if its machine had lost power, and
started again. At the end the control variates on all disks are compared. The exit code is 0 if the run reached its
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
    """What somebody with ca.crt gets at the gate: a name of each attempt, and what Flower's own command said."""
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
    print(f"A Flower app in {folder / 'demo'}, as `covary new-app demo --torch` writes it.")
    with Federation(folder / "machines", [folder / "demo"]) as here:
        print("A SuperLink is up, and nginx as its gate. Three nodes register their keys and connect: `covary node`.")
        for number, name in enumerate(NODES):
            here.register(name)
            here.start_node(name, {"partition-id": number})
        shown = 0

        def follow(until):
            """Show what the server says until something has happened."""
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
        for what, refused in tried.items():
            print(f"An outsider with ca.crt tries to {what}: {'refused by the gate' if refused else 'LET IN'}.")
        print("hospital-b loses power (SIGKILL).")
        here.kill("hospital-b")
        here.start_node("hospital-b", {"partition-id": 1})
        print("It is started again, and again until the SuperLink has noticed that it was gone and lets it in.")
        here.wait_for_node("hospital-b")
        print("hospital-b is back, with its control variate on its disk.")
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
