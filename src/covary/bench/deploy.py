"""A round of a deployed run against Flower's FedAvg, with the same model, data, steps and machines."""

from __future__ import annotations

import contextlib
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from covary.runs.folder import RunFolder

NODES = 2
TASK = """
import time

import torch

STEPS, BATCH, FEATURES, CLASSES, SIZE = {steps}, {batch}, {features}, {classes}, {size}


def network():
    return torch.nn.Linear(FEATURES, CLASSES)


def loss(module, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(module(x), y)


def data(context):
    torch.manual_seed(int(context.node_config["partition-id"]))
    return torch.rand(SIZE, FEATURES), torch.randint(CLASSES, (SIZE,))
"""
COVARY = {
    "client": """
        from covary.flower import Limits, torch_client_app
        from {package}.task import data, loss, network

        limits = Limits(smallest_batch=1, whole_passes=False)
        app = torch_client_app(lambda context: network(), loss, data, limits=limits)
    """,
    "server": """
        import covary as cv
        from covary.flower import server_app
        from {package}.task import BATCH, STEPS, network

        app = server_app(
            cv.scaffold(eta_l=0.1), network, rounds=1, local_steps=STEPS, batch_size=BATCH, eval_every=0
        )
    """,
}
FLOWER = {
    "client": """
        import torch
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from {package}.task import BATCH, SIZE, STEPS, data, loss, network

        app = ClientApp()


        @app.train()
        def train(message, context):
            module = network()
            module.load_state_dict(message.content["arrays"].to_torch_state_dict())
            x, y = data(context)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for k in range(STEPS):
                rows = torch.randperm(SIZE)[:BATCH]
                optimizer.zero_grad()
                loss(module, (x[rows], y[rows])).backward()
                optimizer.step()
            content = RecordDict({{
                "arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({{"num-examples": SIZE}})
            }})
            return Message(content, reply_to=message)
    """,
    "server": """
        import json, time
        from pathlib import Path

        from flwr.app import ArrayRecord
        from flwr.serverapp import ServerApp
        from flwr.serverapp.strategy import FedAvg
        from {package}.task import network

        app = ServerApp()


        class Timed(FedAvg):
            def configure_train(self, *args, **kwargs):
                self.started = time.monotonic()
                return super().configure_train(*args, **kwargs)

            def aggregate_train(self, server_round, replies):
                replies = list(replies)
                up = sum(
                    len(array.data)
                    for reply in replies
                    for record in reply.content.array_records.values()
                    for array in record.values()
                )
                row = {{"round": server_round, "seconds": time.monotonic() - self.started, "bytes_up": up}}
                with (self.folder / "results.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\\n")
                return super().aggregate_train(server_round, replies)


        @app.main()
        def main(grid, context):
            nodes = int(context.run_config["min-clients"])
            strategy = Timed(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
            strategy.folder = Path(context.run_config["checkpoint"])
            strategy.folder.mkdir(parents=True)
            strategy.start(
                grid, ArrayRecord(network().state_dict()), num_rounds=int(context.run_config["rounds"])
            )
    """,
}


def time_rounds(quick: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Seconds and uploaded bytes per round of covary's SCAFFOLD and Flower's FedAvg, with TLS and keys."""
    from covary.flower.local import Federation

    rounds = 2 if quick else 8
    sizes = {"steps": 25, "batch": 195, "features": 784, "classes": 62, "size": 975}
    if quick:
        sizes = {"steps": 2, "batch": 5, "features": 10, "classes": 3, "size": 20}
    records = []
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        for name, files in (("scaffold", COVARY), ("fedavg", FLOWER)):
            _write(Path(temporary) / name, name, files, sizes)
        apps = [Path(temporary) / name for name in ("scaffold", "fedavg")]
        here = stack.enter_context(Federation(Path(temporary) / "here", apps))
        for number in range(NODES):
            here.register(f"node{number}")
            here.start_node(f"node{number}", {"partition-id": number})
        for who, name in (("covary, SCAFFOLD", "scaffold"), ("Flower, FedAvg", "fedavg")):
            say(f"deployed rounds: {who}")
            folder = Path(temporary) / f"{name}-checkpoint"
            here.run(Path(temporary) / name, {"rounds": rounds, "checkpoint": str(folder)}, name)
            here.wait(name)
            rows = RunFolder(folder).read()[1:]  # without the first round, which compiles
            record = {column: float(np.median([row[column] for row in rows])) for column in ("seconds", "bytes_up")}
            records.append({"what": "deploy", "who": who, "nodes": NODES, **record})
    return records


def _write(folder: Path, package: str, files: dict[str, str], sizes: dict[str, int]) -> None:
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").touch()
    (folder / package / "task.py").write_text(TASK.format(**sizes))
    for name, text in files.items():
        (folder / package / f"{name}.py").write_text(textwrap.dedent(text.format(package=package)))
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{package}"\nversion = "1.0.0"\ndescription = "timed"\nlicense = "Apache-2.0"\n'
        "dependencies = []\n[build-system]\n"
        'requires = ["hatchling"]\nbuild-backend = "hatchling.build"\n[tool.hatch.build.targets.wheel]\n'
        'packages = ["."]\n[tool.flwr.app]\npublisher = "you"\n[tool.flwr.app.components]\n'
        f'serverapp = "{package}.server:app"\nclientapp = "{package}.client:app"\n'
        f'[tool.flwr.app.config]\nrounds = 1\nmin-clients = {NODES}\ncheckpoint = ""\n'
    )
