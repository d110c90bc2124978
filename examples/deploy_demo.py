"""`make deploy-demo`: three nodes on this machine, with TLS and keys, a PyTorch model, and a node that dies.

Handwritten digits sorted by label, so that each node has its own few of them. After some rounds one node is killed, as
if its machine had lost power, and started again; at the end the control variates on all disks are compared.
"""

import sys
import time
from pathlib import Path

from covary.durable import File
from covary.flower import audit
from covary.flower.local import Federation
from covary.flower.template import write_app

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
NODES = ("hospital-a", "hospital-b", "hospital-c")


def main():
    folder = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-deploy-demo"
    folder.mkdir(parents=True)
    checkpoint = folder.absolute() / "checkpoint"
    write_app(folder / "demo", with_torch=True)
    print(f"A Flower app in {folder / 'demo'}, as `covary new-app demo --torch` writes it.")
    with Federation(folder / "machines") as here:
        print("A SuperLink with TLS is up. Three nodes register their keys and connect.")
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
        print("hospital-b loses power (SIGKILL).")
        here.kill("hospital-b")
        here.start_node("hospital-b", {"partition-id": 1})
        print("It is started again, and again until the SuperLink has noticed that it was gone and lets it in.")
        here.wait_for_node("hospital-b")
        print("hospital-b is back, with its control variate on its disk.")
        follow(lambda: False)
        status = here.wait("run", timeout=60)
    found = audit(checkpoint, [here.state(name) for name in NODES])
    print(f"\nThe disks after round {found.round} (epoch {found.epoch}), {found.members} members:")
    for name, norm in found.norms.items():
        print(f"  member {name}: ‖c_i‖ = {norm:.4f}")
    print(f"  server: ‖c‖ = {found.norm:.4f}, ‖c - mean c_i‖ = {found.gap:.1e}")
    print("c = mean(c_i) holds." if found.holds else "c = mean(c_i) DOES NOT HOLD.")
    return 0 if found.holds and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
