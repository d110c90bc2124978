# pyright: reportMissingImports=false
"""Other simulators on the same round: pfl, Flower and FLGo, each with its own API and its own training loop.

Each runs on the CPU in a new process, so that its settings, seeds and logs do not affect covary. Its data are float
tensors in memory before the clock starts, its batches come in the stored order, and it does not evaluate in the timed
rounds. The first round is not timed.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from covary.bench.workloads import Workload
from covary.runs.machine import cores

LEARNING_RATE = 0.1


def pfl_round(workload: Workload, rounds: int, processes: int | None = None) -> float:
    """Seconds of pfl's fastest round of FedAvg, in one process per core or in `processes`, as with `torchrun`."""
    processes = processes or min(cores(), workload.cohort)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = [{"PFL_PYTORCH_DEVICE": "cpu"} for _ in range(processes)]
    for rank, place in enumerate(places if processes > 1 else []):
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "covary"}
        place |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        place |= {"LOCAL_WORLD_SIZE": str(processes)}
    return _in_new_processes(f"_pfl({workload!r}, {rounds}, {processes})", workload, places)


def flower_round(workload: Workload, rounds: int) -> float:
    """Seconds of the fastest round of FedAvg in Flower's simulation engine, with one Ray actor per core."""
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_LOG_LEVEL": "ERROR",
        "FLWR_HOME": ".flwr",
    }
    quiet |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return _in_new_processes(f"_flower({workload!r}, {rounds})", workload, [quiet])


def flgo_round(workload: Workload, rounds: int) -> float:
    """Seconds of FLGo's fastest round of FedAvg, with its clients in one thread per core."""
    return _in_new_processes(f"_flgo({workload!r}, {rounds}, 'fedavg')", workload, [{"OMP_NUM_THREADS": "1"}])


def flgo_scaffold_round(workload: Workload, rounds: int) -> float:
    """Seconds of the fastest round of FLGo's own SCAFFOLD, with its clients in one thread per core."""
    return _in_new_processes(f"_flgo({workload!r}, {rounds}, 'scaffold')", workload, [{"OMP_NUM_THREADS": "1"}])


def _in_new_processes(call: str, workload: Workload, places: list[dict[str, str]]) -> float:
    """Evaluate a call in new processes, one per set of environment variables, and return the value of the first."""
    if workload.model not in ("logistic", "mlp"):
        raise RuntimeError(f"the model {workload.model!r} is not implemented for the other simulators")
    if workload.size % workload.batch or workload.steps % (workload.size // workload.batch):
        raise RuntimeError(f"{workload.steps} steps are not whole epochs of equal batches")
    code = "from covary.bench import peers; from covary.bench.workloads import Workload; "
    code += f"print(peers.{call}, flush=True)"
    if len(places) > 1:
        code += "; import os; os._exit(0)"  # connected processes can abort each other at a normal exit
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        children: list[subprocess.Popen[str]] = []
        for place in places:
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"} | place
            pipe = subprocess.PIPE
            command = [sys.executable, "-c", code]
            child = subprocess.Popen(command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True)
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
        answers = [child.communicate() for child in children]
    for child, (_, errors) in zip(children, answers, strict=True):
        if child.returncode:
            raise RuntimeError((errors.strip().splitlines() or [f"exit status {child.returncode}"])[-1])
    return float(answers[0][0].split()[-1])


def _fastest(ends: list[float]) -> float:
    """The shortest time between the ends of two rounds; the first entry is the end of the untimed round."""
    return min(b - a for a, b in itertools.pairwise(ends))


@lru_cache(maxsize=1)
def tensors(workload: Workload) -> tuple[Any, Any]:
    """The workload's images as float32 in [0, 1] and its labels as int64, for PyTorch."""
    import torch

    return torch.from_numpy(workload.x).float().div_(255), torch.from_numpy(workload.y).long()


def network(workload: Workload) -> Any:
    """The workload's model in PyTorch."""
    from torch import nn

    if workload.model == "logistic":
        return nn.Sequential(nn.Linear(workload.features, workload.classes))
    hidden = nn.Linear(workload.features, workload.hidden)
    return nn.Sequential(hidden, nn.ReLU(), nn.Linear(workload.hidden, workload.classes))


def _pfl(workload: Workload, rounds: int, processes: int) -> float:
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(max(1, cores() // processes))
    np.random.seed(0)
    torch.manual_seed(0)
    ends: list[float] = []

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network(workload)

        def loss(self, x: Any, y: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.layers(x), y)

        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            ends.append(time.perf_counter())
            return False, Metrics()

    users = [PyTorchTensorDataset(pair, user_id=str(i)) for i, pair in enumerate(zip(*tensors(workload), strict=True))]
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(range(len(users)))))
    module = Network()
    FederatedAveraging().run(
        NNAlgorithmParams(
            rounds + 1, evaluation_frequency=rounds + 2, train_cohort_size=workload.cohort, val_cohort_size=None
        ),
        SimulatedBackend(data, data),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=workload.batch,
            local_num_epochs=workload.steps * workload.batch // workload.size,
            local_learning_rate=LEARNING_RATE,
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return _fastest(ends)


def _flower(workload: Workload, rounds: int) -> float:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    ends: list[float] = []
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        import torch

        from covary.bench.peers import LEARNING_RATE, network, tensors

        torch.set_num_threads(1)
        x, y = (t[int(context.node_config["partition-id"])].split(workload.batch) for t in tensors(workload))
        model = network(workload)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for step in range(workload.steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[step % len(x)]), y[step % len(y)]).backward()
            optimizer.step()
        reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": workload.size})}
        return Message(content=RecordDict(reply), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        def clock(server_round: int, arrays: ArrayRecord) -> None:
            if server_round:
                ends.append(time.perf_counter())

        strategy = FedAvg(
            fraction_train=workload.cohort / workload.n_clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.cohort,
            min_available_nodes=workload.n_clients,
            train_metrics_aggr_fn=lambda replies, key: MetricRecord({"clients": len(replies)}),
        )
        result = strategy.start(
            grid, ArrayRecord(network(workload).state_dict()), num_rounds=rounds + 1, evaluate_fn=clock
        )
        replies = [metrics["clients"] for metrics in result.train_metrics_clientapp.values()]
        if replies != [workload.cohort] * (rounds + 1):
            raise RuntimeError(f"Flower's clients failed: {replies} answers in the rounds")

    ray = {
        "num_cpus": min(cores(), workload.cohort),
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "include_dashboard": False,
    }
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, client, workload.n_clients, backend_config={"init_args": ray, "client_resources": resources})
    return _fastest(ends)


FLGO_TASK = """
import torch
from covary.bench import peers
from covary.bench.workloads import Workload

class Client(torch.utils.data.TensorDataset):
    def __getitems__(self, indices):
        return self[indices]

workload = {workload!r}
train_data = [Client(x, y) for x, y in zip(*peers.tensors(workload))]
collate_fn = lambda batch: batch
data_to_device = lambda batch, device: batch
eval = lambda model, loader, device: {{}}

def get_model():
    return peers.network(workload)

def compute_loss(model, batch, device):
    return {{"loss": torch.nn.functional.cross_entropy(model(batch[0]), batch[1])}}
"""


def _flgo(workload: Workload, rounds: int, algorithm: str) -> float:
    import flgo
    from flgo.experiment.logger import BasicLogger

    ends: list[float] = []

    class Clock(BasicLogger):
        def log_once(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def save_output_as_json(self, *args: Any, **kwargs: Any) -> None:
            pass

    option = {
        "num_rounds": rounds + 1,
        "num_steps": workload.steps,
        "batch_size": workload.batch,
        "proportion": (workload.cohort + 0.5) / workload.n_clients,
        "learning_rate": LEARNING_RATE,
        "train_holdout": 0.0,
        "torch_num_threads": 1,
        "num_parallels": min(cores(), workload.cohort),
        "parallel_type": "t",
        "no_log_console": True,
        "no_tqdm": True,
    }
    Path("config.py").write_text(FLGO_TASK.format(workload=workload))
    task = flgo.gen_direct_task_from_file("covary_task", "config.py")
    method = importlib.import_module(f"flgo.algorithm.{algorithm}")
    flgo.init(task, method, option, Logger=Clock).run()
    return _fastest(ends[1:])


PEERS: dict[str, tuple[str, Callable[[Workload, int], float]]] = {
    "pfl, FedAvg": ("pfl", pfl_round),
    "Flower, FedAvg": ("flwr", flower_round),
    "FLGo, FedAvg": ("flgo", flgo_round),
    "FLGo, SCAFFOLD": ("flgo", flgo_scaffold_round),
}
