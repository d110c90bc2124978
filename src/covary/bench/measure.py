"""The measurements of `covary bench`. Each returns plain numbers for JSON records."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from covary.algorithms import scaffold
from covary.bench import deploy as deployed
from covary.bench import peers, torch_rivals
from covary.bench.clock import Clock
from covary.bench.deep import GPT_14M, GPT_14M_LOOPED, GPT_124M, RESNET, RESNET_ON_CPU, SMALL_RESNET, DeepWorkload
from covary.bench.workloads import CNN, W1, W2, Workload
from covary.data.federated import FederatedData
from covary.models import logistic_regression
from covary.problem import supervised
from covary.runs import machine
from covary.simulate import simulate
from covary.sweep import sweep as swept

Say = Callable[[str], None]
SWEEP = {"eta_l": list(np.logspace(-2, -0.5, 8))}


def measured_on() -> dict[str, Any]:
    """The machine and the versions behind the measurements."""
    first = jax.devices()[0]
    return {
        "device": first.device_kind if first.platform != "cpu" else machine.processor(),
        "platform": first.platform,
        "cores": machine.cores(),
        **machine.versions("covary", "jax", "jaxlib", "numpy", "torch", "flwr", "pfl", "flgo"),
    }


def covary_round(workload: Workload, seconds: float, **how: Any) -> dict[str, float]:
    """Seconds per round of SCAFFOLD in `simulate` without evaluation, and seconds until the first round is done."""
    problem = workload.problem()
    clock = Clock()
    simulate(scaffold(eta_l=torch_rivals.ETA_L), problem, log=clock.tick, **_training(workload, seconds), **how)
    return {"seconds": clock.fastest(), "first_round": clock.first()}


def covary_sweep(workload: Workload, seconds: float) -> float:
    """Seconds per round of all 24 members, 8 step-sizes with 3 seeds each."""
    clock = Clock()
    training = _training(workload, seconds)
    swept(scaffold, workload.problem(), SWEEP, seeds=[0, 1, 2], log=clock.tick, **training)
    return clock.fastest()


def _training(workload: Workload, seconds: float) -> dict[str, Any]:
    """The arguments of `simulate` for about `seconds` seconds of the paper's round, evaluated only at the end."""
    flops = 4 * workload.cohort * workload.steps * workload.batch * workload.features * workload.classes
    speed = {"cpu": 1e11, "gpu": 1.5e13}[jax.devices()[0].platform if jax.devices()[0].platform == "gpu" else "cpu"]
    slower = {"logistic": 1, "mlp": 3.5, "cnn": 300}[workload.model]
    return {
        "rounds": 10 + int(seconds * speed / flops / slower),
        "clients_per_round": workload.cohort,
        "local_steps": workload.steps,
        "batch_size": workload.batch,
        "eval_every": 10**6,
    }


def rounds(quick: bool, with_peers: bool, say: Say) -> list[dict[str, Any]]:
    """The paper's round in covary, PyTorch and other simulators, one after the other on the same data."""
    gpu = jax.devices()[0].platform == "gpu"
    device = "cuda" if gpu else "cpu"
    records = []
    for workload in (W1, W2):
        if quick:
            workload = replace(workload, n_clients=6, cohort=2, steps=2, size=390)
        repeats, span = (1, 0.1) if quick else (5, 5.0)
        entries: dict[str, Callable[[], float]] = {"covary": lambda w=workload, s=span: covary_round(w, s)["seconds"]}
        if gpu:
            entries["covary, bfloat16"] = lambda w=workload, s=span: covary_round(w, s, precision="bfloat16")["seconds"]
        if importlib.util.find_spec("torch") is not None:
            entries |= _rivals(workload, repeats, device, with_peers)
        for name, work in entries.items():
            say(f"{workload.name}: {name}")
            records.append({"what": "round", "workload": workload.name, "who": name, **_attempt(work)})
    return records


def _rivals(workload: Workload, repeats: int, device: str, with_peers: bool) -> dict[str, Callable[[], float]]:
    """PyTorch loops and other simulators."""
    entries: dict[str, Callable[[], float]] = {}
    if device == "cpu":
        entries["matrix products alone"] = lambda: torch_rivals.floor(workload, repeats)
    entries |= {
        "PyTorch, batched clients": lambda: torch_rivals.batched_clients(workload, repeats, device),
        "PyTorch, client by client": lambda: torch_rivals.per_client_loop(workload, repeats, device),
    }
    if with_peers and device == "cpu":
        for name, (module, function) in peers.PEERS.items():
            if importlib.util.find_spec(module) is not None:
                entries[name] = lambda f=function: f(workload, repeats)
    return entries


def torch(quick: bool, with_peers: bool, say: Say) -> Iterator[dict[str, Any]]:
    """PyTorch modules in covary, against loops written by hand and other simulators on the same modules."""
    from covary.bench.modules import module_round

    gpu = jax.devices()[0].platform == "gpu"
    device = "cuda" if gpu else "cpu"
    for workload in (W1, W2):
        if quick:
            workload = replace(workload, n_clients=6, cohort=2, steps=2, size=390)
        repeats = 1 if quick else 5
        entries = {"covary, module": lambda w=workload: module_round(w, 3 if quick else 30, device)}
        entries |= _rivals(workload, repeats, device, with_peers)
        for name, work in entries.items():
            say(f"{workload.name}: {name}")
            yield {"what": "round", "workload": f"{workload.name}, a module", "who": name, **_attempt(work)}
    tiny = replace(SMALL_RESNET, model=replace(SMALL_RESNET.model, widths=(4, 8)), n_clients=4, cohort=2, steps=2)
    for workload in [RESNET, GPT_14M] if gpu else [tiny if quick else RESNET_ON_CPU]:
        for row in _module_rows(workload, gpu, quick, say):
            yield {"what": "deep", "workload": f"{workload.name}, a module", **row}


def _module_rows(workload: DeepWorkload, gpu: bool, quick: bool, say: Say) -> Iterator[dict[str, Any]]:
    """covary and loops written by hand, each in a new process with empty caches."""
    rounds = 3 if quick else 5
    codes = {"covary, module": f"module_deep_round({workload!r}, {rounds})"}
    if gpu:
        low = "precision='bfloat16'"
        codes["covary, bfloat16"] = f"module_deep_round({workload!r}, {rounds}, {low})"
        codes["covary, loss compiled, bfloat16"] = f"module_deep_round({workload!r}, {rounds}, True, {low})"
        codes["covary, loss compiled"] = f"module_deep_round({workload!r}, {rounds}, True)"
    for precision in (None, "bfloat16") if gpu else (None,):
        for mode in ("eager", "compile", "graph") if gpu else ("eager",):
            who = f"PyTorch, {mode}{', bfloat16' if precision else ''}"
            codes[who] = f"time_loop({workload!r}, {mode!r}, {precision!r}, {rounds})"
    for who, code in codes.items():
        say(f"{workload.name}: {who}")
        with tempfile.TemporaryDirectory() as caches:
            yield {"who": who, **_in_new_process(code, caches)}


def _attempt(work: Callable[[], float]) -> dict[str, Any]:
    try:
        return {"seconds": work()}
    except (RuntimeError, OSError, ImportError) as error:
        return {"seconds": None, "why": str(error).splitlines()[0]}


def sweep(quick: bool, say: Say) -> list[dict[str, Any]]:
    """A sweep of 24 runs against one run."""
    workload = replace(W1, n_clients=6, cohort=2, steps=2, size=390) if quick else W1
    say("one run, then a sweep of 24")
    span = 0.1 if quick else 5.0
    return [
        {
            "what": "sweep",
            "members": 24,
            "one": covary_round(workload, span)["seconds"],
            "seconds": covary_sweep(workload, span),
        }
    ]


def cnn(quick: bool, say: Say) -> list[dict[str, Any]]:
    """The convolutional network: clients in the width that covary's trial chooses, against PyTorch loops."""
    gpu = jax.devices()[0].platform == "gpu"
    workload = CNN if gpu else replace(CNN, n_clients=10, cohort=4, steps=2)
    if quick:
        workload = replace(CNN, n_clients=4, cohort=2, steps=1, batch=5, size=10)
    records = []
    for who, how in {"covary": {}, "covary, one by one": {"width": 1}, "covary, all at once": {"width": 20}}.items():
        say(f"CNN: {who}")
        work = _attempt(lambda how=how: covary_round(workload, 0.1 if quick else 5.0, **how)["seconds"])
        records.append({"what": "round", "workload": "CNN", "who": who, **work})
    if importlib.util.find_spec("torch") is not None:
        device = "cuda" if gpu else "cpu"
        for who, compiled in {"PyTorch, client by client": False, "the same with torch.compile": True}.items():
            say(f"CNN: {who}")
            work = _attempt(lambda c=compiled: torch_rivals.per_client_loop(workload, 1 if quick else 3, device, c))
            records.append({"what": "round", "workload": "CNN", "who": who, **work})
    return records


def deep(quick: bool, say: Say) -> Iterator[dict[str, Any]]:
    """Deep networks: the first round and a later one, each contender in a new process with empty caches.

    covary's first round is timed again in a second process. Without a GPU, the network is a small one.
    """
    gpu = jax.devices()[0].platform == "gpu"
    tiny = replace(SMALL_RESNET, model=replace(SMALL_RESNET.model, widths=(4, 8)), n_clients=4, cohort=2, steps=2)
    workloads = [RESNET, GPT_14M, GPT_14M_LOOPED, GPT_124M] if gpu else [tiny if quick else SMALL_RESNET]
    for workload in workloads:
        for row in _deep_rows(workload, gpu, quick, say):
            yield {"what": "deep", "workload": workload.name, **row}


def _deep_rows(workload: DeepWorkload, gpu: bool, quick: bool, say: Say) -> Iterator[dict[str, Any]]:
    rounds, theirs = (4, 2) if quick else (7, 4)
    low: dict[str, str] = {"precision": "bfloat16"}
    ours: dict[str, dict[str, Any]] = {"covary, bfloat16": low, "covary": {}} if gpu else {"covary": {}}
    large = workload is GPT_124M
    if large:
        ours = {"covary, bfloat16": low, "the same, states on the host": low | {"store": "host"}}
    for who, how in ours.items():
        with tempfile.TemporaryDirectory() as caches:
            for number in range(1 if large else 2):
                say(f"{workload.name}: {who}{' in a second process' if number else ''}")
                code = f"deep_round({workload!r}, {rounds}, **{how!r})"
                row = _in_new_process(code, caches)
                if number:
                    yield row | {"who": f"{who}, in a second process", "seconds": None}
                else:
                    yield {"who": who, **row}
    if importlib.util.find_spec("torch") is None or workload in (GPT_14M_LOOPED, GPT_124M):
        return
    for precision in (None, "bfloat16") if gpu else (None,):
        for mode in ("eager", "compile", "graph") if gpu else ("eager", "compile"):
            who = f"PyTorch, {mode}{', bfloat16' if precision else ''}"
            say(f"{workload.name}: {who}")
            with tempfile.TemporaryDirectory() as caches:
                code = f"time_loop({workload!r}, {mode!r}, {precision!r}, {theirs})"
                yield {"who": who, **_in_new_process(code, caches)}


def deep_round(workload: DeepWorkload, rounds: int, **how: Any) -> dict[str, float]:
    """Seconds until the first round of SCAFFOLD is done, seconds of the fastest later one, and bytes."""
    problem, clock = workload.problem(), Clock()
    simulate(
        scaffold(eta_l=torch_rivals.ETA_L),
        problem,
        rounds,
        clients_per_round=workload.cohort,
        local_steps=workload.steps,
        batch_size=workload.batch,
        eval_every=10**6,
        log=clock.tick,
        **how,
    )
    model = jax.eval_shape(workload.model.init, jax.random.key(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    return {
        "first": clock.first(),
        "seconds": clock.fastest(),
        "parameters": parameters,
        "states": 4 * parameters * (workload.n_clients + 2),  # every c_i, c and x
        "peak": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0),
    }


def _in_new_process(code: str, caches: str) -> dict[str, Any]:
    """The dict that an expression on deep workloads returns, or why there is none."""
    names = ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {name: caches for name in names if name != "JAX_COMPILATION_CACHE_DIR"}
    module = {"time_loop": "deep_torch", "module_deep_round": "modules"}.get(code.split("(")[0], "measure")
    program = f"import json; from covary.bench.deep import *; from covary.bench.{module} import *"
    program += f"; print(json.dumps({code}))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"first": None, "seconds": None, "why": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def first(quick: bool, say: Say) -> list[dict[str, Any]]:
    """Seconds from a cold start to the first rounds of `covary compare` and of W1, with an empty compilation cache, and
    again with the filled one."""
    records = []
    with tempfile.TemporaryDirectory() as home:
        for cache in ("empty", "filled"):
            say(f"first results, cache {cache}")
            environment = {**os.environ, "XDG_CACHE_HOME": home}
            compare = _seconds_to("round ", [sys.executable, "-m", "covary", "compare", "--out", home], environment)
            records.append(
                {"what": "first", "cache": cache, "compare": compare, "w1": _first_round(quick, environment)}
            )
    return records


def _first_round(quick: bool, environment: dict[str, str]) -> dict[str, float]:
    """For W1 in a new process: the time to the first round, and this time minus that of a later round."""
    sizes = "n_clients=6, cohort=2, steps=2, size=390" if quick else ""
    code = (
        "import dataclasses; from covary.bench.measure import covary_round; from covary.bench.workloads import W1;"
        f"m = covary_round(dataclasses.replace(W1, {sizes}), 1.0);"
        "print(m['first_round'], m['first_round'] - m['seconds'])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first_round, compilation = map(float, done.stdout.split())
    return {"first_round": first_round, "compilation_and_setup": compilation}


def _seconds_to(text: str, command: list[str], environment: dict[str, str]) -> float:
    """Seconds until a command prints a text on its terminal. The command is then stopped."""
    master, slave = pty.openpty()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave, env=environment)
    os.close(slave)
    seen = ""
    try:
        while text not in seen:
            seen += os.read(master, 4096).decode(errors="replace")
        return time.perf_counter() - start
    finally:
        process.kill()
        process.wait()
        os.close(master)


def growth(quick: bool, say: Say) -> list[dict[str, Any]]:
    """The time per round by N, up to a million clients on disk, and by S, K and d."""
    records = []
    sizes = [100, 1000] if quick else [10**3, 10**4, 10**5, 10**6]
    with tempfile.TemporaryDirectory() as folder:
        for n in sizes:
            say(f"{n:,} clients on disk")
            records.append({"what": "clients", "N": n, **_many_clients(n, Path(folder), 5 if quick else 60)})
    base = {"S": 20, "K": 20, "d": 785 * 200}
    ladders = {"S": [10, 20, 40, 80], "K": [10, 20, 40, 80], "d": [785 * classes for classes in (100, 200, 400, 800)]}
    for name, values in list(ladders.items())[: 1 if quick else 3]:
        for value in values[:2] if quick else values:
            say(f"{name} = {value}")
            records.append(
                {"what": "linear", "in": name, "value": value, "seconds": _seconds_at(base | {name: value}, quick)}
            )
    return records


def deploy(quick: bool, say: Say) -> list[dict[str, Any]]:
    """A deployed round against plain Flower. It needs Flower and PyTorch."""
    return deployed.time_rounds(quick, say)


def _many_clients(n: int, folder: Path, rounds: int) -> dict[str, float]:
    """Logistic regression 784 -> 10 (d = 7,850), 5 examples per client, S = 100, states and data on disk."""
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (10_000, 784), dtype=np.uint8)
    where = folder / str(n)
    places = rng.integers(0, 9_995, n)
    FederatedData.write(where, ((pool[k : k + 5], np.arange(k, k + 5) % 10) for k in places))
    if hasattr(os, "sync"):
        os.sync()  # the data reaches the disk before rounds are timed
    data = FederatedData.open(where, stream=True)
    problem = supervised(logistic_regression(784, 10), data, test=(pool[:500], np.arange(500) % 10))
    marks, resident = [], []

    def log(_: int, __: Any) -> None:
        marks.append(time.perf_counter())
        resident.append(_resident())

    cohort = min(100, n // 2)
    simulate(
        scaffold(eta_l=0.05),
        problem,
        rounds,
        clients_per_round=cohort,
        local_steps=10,
        batch_size=5,
        eval_every=10**6,
        log=log,
        store=folder / f"{n}-states",
    )
    seconds = np.diff(marks)[rounds // 4 :]
    return {"seconds": float(np.median(seconds)), "resident_bytes": float(max(resident)), "S": cohort}


def _resident() -> int:
    """The resident memory of this process in bytes."""
    if Path("/proc/self/statm").is_file():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _seconds_at(sizes: dict[str, int], quick: bool) -> float:
    """Seconds per round for given S, K and d."""
    S, K, classes = sizes["S"], sizes["K"], sizes["d"] // 785
    divisor = 4 if quick else 1
    classes = max(2, classes // divisor)
    workload = Workload("plain", "logistic", 80, S // divisor, K // divisor, 50, 100, 784, 0, classes)
    return covary_round(workload, 0.1 if quick else 2.0)["seconds"]
