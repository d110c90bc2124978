"""Mutation check: break covary in one place at a time and see whether its tests notice.

    python tests/mutants.py                          all mutants, with two processes
    python tests/mutants.py --sample 40 --seed 1     some of them
    python tests/mutants.py --only scaffold.py       those whose description matches a regular expression

A mutant is the source of one module with one small change: `+` for `-`, `<=` for `<`, 2 for 1, another field of the
same NamedTuple, a statement left out. It is killed if a test that `make test` runs fails on it, or does not end. For
every mutant a process is forked from one that has imported everything but covary. There the changed module is imported
in place of the one on the disk, and the tests that TARGETS names run: first the quick ones, then the wider ones.

The exit code is 1 if fewer than 95 % of the mutants are killed, or if one survives that EXPLAINED does not name. Those
that it names are not run and count as survivors.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import gc
import importlib.machinery
import importlib.util
import io
import os
import random
import re
import resource
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
REQUIRED = 0.95


class Target(NamedTuple):
    path: str
    functions: tuple[str, ...]  # the functions that are mutated; all of the file if empty
    first: str  # what to run, as on pytest's command line
    wider: str


def of_algorithm(name: str, also: str = "") -> Target:
    path = f"src/covary/algorithms/{name}.py"
    which = f"-k '({name}{also} or in_the_table or defaults or hyper or plain_loop) and not devices and not disk'"
    first = f"tests/test_equations.py tests/test_oracle.py tests/test_contract.py tests/test_bad_input.py {which}"
    return Target(path, (), first, f"{path} tests/test_simulate.py tests/test_reductions.py {which}")


COHORT = (
    *("sample", "exchange_all", "bound_to_data", "each_client", "take", "put", "owned", "padded", "share"),
    *("real_share", "total", "where"),
)
TARGETS = (
    of_algorithm("common", " or fedavg or mime"),
    of_algorithm("dane"),
    of_algorithm("fedavg"),
    of_algorithm("feddyn"),
    of_algorithm("fedprox"),
    of_algorithm("mime"),
    of_algorithm("scaffold", " or option or warm"),
    of_algorithm("sgd"),
    of_algorithm("vrl_sgd"),
    Target(
        "src/covary/client.py",
        (),
        "src/covary/client.py tests/test_contract.py -k 'client_loop or plain_loop'",
        "tests/test_oracle.py tests/test_simulate.py tests/test_flower.py"
        " -k 'drift or (plain_numpy and once and (mime or sgd)) or clip or (simulated_one and (sgd or dane-2))'",
    ),
    Target("src/covary/draws.py", (), "tests/test_draws.py", "src/covary/draws.py"),
    Target(
        "src/covary/_engine/cohort.py",
        COHORT,
        "tests/test_engine.py tests/test_equations.py -k 'floyd or own_choice or fedavg or mime or feddyn'",
        "tests/test_engine.py tests/test_simulate.py tests/test_plain.py -k 'every_mode or cohorts"
        " or streamed_data_gives or (weights and few) or drift or start_visits or numbers_of_the'",
    ),
    Target(
        "src/covary/running/plan.py",
        ("client_weights", "batch_bounds", "aggregation_weights"),
        "src/covary/running/plan.py tests/test_equations.py -k 'plan or mime'",
        "tests/test_plain.py tests/test_journal.py -k 'numbers_of_the or sampled_cohort'",
    ),
    Target(
        "src/covary/flower/journal.py",
        (),
        "tests/test_journal.py -k 'not broken_on_purpose'",
        "tests/test_flower.py tests/test_doors.py -k '(simulated_one and scaffold-2) or unequal"
        " or killed_server_resumes or deleted_disk or leave_for_good or damaged_journal or old_copy or of_two_servers"
        " or one_state_folder or resumed_with_another'",
    ),
    Target(
        "src/covary/flower/merge.py",
        ("merge", "_mean", "named", "prefixed"),
        "tests/test_journal.py -k 'not broken_on_purpose'",
        "tests/test_flower.py -k '(simulated_one and (scaffold-2 or dane-2)) or unequal or buffers_are'",
    ),
)

EXPLAINED: dict[str, dict[tuple[str, str], str]] = {
    "src/covary/algorithms/dane.py": {
        (
            'return Algorithm("dane", lambda x: Server(x, 0 * x), stateless, (gradient_exchange("g"), solve))',
            "0  ->  1",
        ): "the first exchange sets g before it is read",
    },
    "src/covary/algorithms/mime.py": {
        (
            'return Algorithm("mime", lambda x: Server(x, 0 * x), stateless, (gradient_exchange("c"), correct))',
            "0  ->  1",
        ): "the first exchange sets c before it is read",
    },
    "src/covary/algorithms/vrl_sgd.py": {
        (
            'return Algorithm("vrl_sgd", Server, lambda x: Client(0 * x, x, 0.0), (exchange,), lockstep=True)',
            "0.0  ->  1.0",
        ): "it is multiplied by x - y_i, which is 0 before the first round",
    },
    "src/covary/client.py": {
        (
            "return (moved, total), None",
            "return ((moved, total), None)  ->  pass",
        ): "the statement after it then chooses the new state in every step",
        ("return 3 * y", "3  ->  4"): "the gradient of a dry run is made up",
    },
    "src/covary/draws.py": {
        (
            "return np.arange(N)",
            "return np.arange(N)  ->  pass",
        ): "a choice of N of N clients, sorted, is all of them too, only slower",
        (
            "for one, end in zip(drawn.tolist(), last.tolist(), strict=True):",
            "True  ->  False",
        ): "both have one entry per draw",
        (
            "high, low = (bits(each, 1)[:, 0] for each in split(keys))",
            "1  ->  2",
        ): "the first word does not depend on how many are drawn",
        ("@lru_cache(maxsize=4096)", "4096  ->  4097"): "the cache changes the speed, not the numbers",
    },
    "src/covary/_engine/cohort.py": {
        (
            "return jnp.arange(N)",
            "return jnp.arange(N)  ->  pass",
        ): "a choice of N of N clients, sorted, is all of them too, only slower",
        ("S = len(cohort.ids)", "cohort.ids  ->  cohort.at"): "both have one entry per client",
        (
            "if width >= len(ids):",
            "width >= len(ids)  ->  width > len(ids)",
        ): "JAX's map takes all clients in one batch too",
        (
            "return jax.vmap(work)(ids, at, slots, rows)",
            "return jax.vmap(work)(ids, at, slots, rows)  ->  pass",
        ): "JAX's map takes all clients in one batch too",
        (
            "at_once = None if width == 1 else width",
            "width == 1  ->  width != 1",
        ): "the width changes the speed, not the numbers",
        ("at_once = None if width == 1 else width", "1  ->  2"): "the width changes the speed, not the numbers",
        (
            "return jax.lax.dynamic_slice_in_dim(padded(place, values, 0), first, each)",
            "0  ->  1",
        ): "what stands in a padded place is replaced by 0",
        (
            "return jnp.sort(jax.lax.fori_loop(0, S, draw, jnp.full(S, -1, jnp.arange(1).dtype)))",
            "1  ->  2",
        ): "no client has a negative number",
        (
            "return jnp.sort(jax.lax.fori_loop(0, S, draw, jnp.full(S, -1, jnp.arange(1).dtype)))",
            "1  ->  2  (no. 2)",
        ): "two numbers have the same type as one",
        (
            "rows = where(mine, leaf[jnp.clip(at, 0, len(leaf) - 1)], 0)",
            "len(leaf) - 1  ->  len(leaf) + 1",
        ): "JAX clamps an index beyond the end, and such rows are replaced by 0",
        (
            "at = padded(place, cohort, -1) - jax.lax.axis_index(AXIS) * n_kept",
            "1  ->  2",
        ): "no device has a client with a negative number",
    },
    "src/covary/running/plan.py": {
        (
            "return j * batch, high - (high > size) * (high - size)  # the smaller of the two",
            "high > size  ->  high >= size",
        ): "both are 0 where high is the size",
    },
    "src/covary/flower/journal.py": {
        (
            'BLANK = {"format": FORMAT, "seq": -1, "epoch": -1, "committed": "", "pending": "", "scale": 0.0, "owner": ""}',  # noqa: E501
            "'owner'  ->  ''",
        ): "a journal that names no owner has the owner ''",
        (
            'facts = {"job": secrets.token_hex(16), "fence": 0, "epoch": 0, "round": 0, "trip": 0, "cohort": [], "warm": []}',  # noqa: E501
            "0  ->  1",
        ): "the clock is above both",
        (
            "return Order(self.job, self.epoch, seq, secrets.token_hex(8), self.members[name].counted, name)",
            "8  ->  9",
        ): "a longer random name is as good",
        (
            "def reset(self, arrays: Arrays, leaving: tuple[str, ...] = (), after: int = -1) -> None:",
            "1  ->  2",
        ): "no epoch is below -1",
    },
    "src/covary/flower/merge.py": {
        (
            "total = sum(w * np.asarray(array, np.float64) for w, array in zip(weights, arrays, strict=True))",
            "True  ->  False",
        ): "there is one weight for each upload",
        (
            "typed = type(server)(*(np.asarray(a, old.dtype) for a, old in zip(new, server, strict=True)))",
            "True  ->  False",
        ): "both are states of the same algorithm's server",
    },
}
"""file -> (line of the source, change) -> why no test can, or should, tell the mutant from covary."""


# Mutants

PAIRS: tuple[tuple[type, type], ...] = (
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
)
OPERATORS = dict(PAIRS) | {second: first for first, second in PAIRS} | {ast.BitAnd: ast.BitOr}
OPERATORS |= dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult), ast.Mult)


class Mutant(NamedTuple):
    target: Target
    line: int
    source: str
    change: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.target.path}:{self.line}: {self.source}\n    {self.change}"

    @property
    def explanation(self) -> str | None:
        return EXPLAINED.get(self.target.path, {}).get((self.source, self.change))


def mutants_of(target: Target) -> list[Mutant]:
    text = (ROOT / target.path).read_text()
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    roots: list[ast.AST] = [functions[name] for name in target.functions] or [tree]
    lines, found, seen = text.splitlines(), [], collections.Counter[tuple[int, str]]()
    for old, new in (pair for root in roots for pair in changes(root, fields(tree))):
        ast.fix_missing_locations(tree)
        change = f"{short(old)}  ->  {short(new)}"
        seen[old.lineno, change] += 1
        change += f"  (no. {n})" if (n := seen[old.lineno, change]) > 1 else ""
        code = compile(tree, str(ROOT / target.path), "exec", dont_inherit=True)
        found.append(Mutant(target, old.lineno, lines[old.lineno - 1].strip(), change, code))
    return found


def changes(node: ast.AST, fields: dict[str, str], text: bool = False) -> Iterator[tuple[Any, ast.AST]]:
    """Change the tree below the node in one place after the other; yield the old and the new part, then undo it."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "bases"):
            continue
        children = value if isinstance(value, list) else [value]
        for at, child in enumerate(children):
            match child:
                case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.ClassDef(bases=[ast.Name(id="Protocol")]):
                    continue
                case ast.Expr(value=ast.Constant()):  # a docstring
                    continue
                case ast.AST():
                    for new in variants(child, fields, text, name in ("test", "ifs"), isinstance(node, ast.If)):
                        replace(node, name, at, ast.copy_location(new, child))
                        yield child, new
                        replace(node, name, at, child)
                    yield from changes(child, fields, text or isinstance(child, ast.Raise))


def replace(node: ast.AST, name: str, at: int, child: ast.AST) -> None:
    value = getattr(node, name)
    if isinstance(value, list):
        value[at] = child
    else:
        setattr(node, name, child)


def variants(node: ast.AST, fields: dict[str, str], text: bool, condition: bool, early: bool) -> Iterator[ast.AST]:
    """What to put in the place of one node."""
    if condition and not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
        yield ast.UnaryOp(ast.Not(), node)
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield changed(node, op=OPERATORS[type(op)]())
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield changed(node, ops=[*ops[:at], OPERATORS[type(op)](), *ops[at + 1 :]])
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=str(value)) if value and not text:
            yield ast.Constant("")
        case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Load()) if (
            owner != "self" and name in fields and not text
        ):
            yield changed(node, attr=fields[name])
    match node:
        case ast.AugAssign() | ast.Raise() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Return() if early:
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() | ast.Tuple(elts=[ast.Attribute(), *_])]):
            yield ast.Pass()


def changed(node: ast.AST, **parts: Any) -> Any:
    new = copy.copy(node)
    for name, part in parts.items():
        setattr(new, name, part)
    return new


def fields(tree: ast.Module) -> dict[str, str]:
    """Every field of the module's NamedTuples, and the field after it."""
    following = {}
    for node in tree.body:
        match node:
            case ast.ClassDef(bases=[ast.Name(id="NamedTuple")], body=body):
                names = [line.target.id for line in body if isinstance(line, ast.AnnAssign)]
                following |= {a: b for a, b in zip(names, names[1:] + names[:1], strict=True) if a != b}
    return following


def short(node: ast.AST) -> str:
    return " ".join(ast.unparse(ast.fix_missing_locations(node)).split())


# Tests

OPTIONS = shlex.split(
    "-q -x -p no:cacheprovider -p no:xdist -o addopts= --doctest-modules --assert=plain -m 'not nightly'"
)


class Mutated(importlib.machinery.SourceFileLoader):
    """Finds and loads one module, with code that differs from that on the disk."""

    def __init__(self, mutant: Mutant):
        name = mutant.target.path.removeprefix("src/").removesuffix(".py").replace("/", ".")
        super().__init__(name, str(ROOT / mutant.target.path))
        self.code = mutant.code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return self.code


def prepare() -> None:
    """Import what covary and its tests import, but nothing of covary, and do not let JAX compute."""
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "mutants")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*OPTIONS, "--collect-only", "conftest.py"])
    for name in ("helpers", "loopback", "covary.cli", "covary.flower.server", "covary.flower.torch"):
        importlib.import_module(name)
    for name in list(sys.modules):
        if name.split(".")[0] in ("covary", "conftest", "helpers", "loopback"):
            del sys.modules[name]
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # without making examples small
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
    hypothesis.settings.load_profile("mutants")
    gc.freeze()  # pytest collects garbage several times; the objects of now stay


class Seconds(NamedTuple):
    wall: float
    cpu: int


def start(target: Target, mutant: Mutant | None, folder: Path, limit: Seconds) -> int:
    """Run the target's tests in a process of its own, whose number is returned; it exits with 0 if they pass."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the parent
        signal.setitimer(signal.ITIMER_REAL, limit.wall)  # the signals of both end the process
        resource.setrlimit(resource.RLIMIT_CPU, (limit.cpu, limit.cpu))
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = tested(target, mutant, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def tested(target: Target, mutant: Mutant | None, folder: Path) -> int:
    import jax

    if mutant is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # its programs are not cached
        sys.meta_path.insert(0, Mutated(mutant))
    for tests in (target.first, target.wider):
        code = pytest.main([*OPTIONS, f"--basetemp={folder}", *shlex.split(tests)])
        if code:
            return int(code)
    return 0


# The check


class Done(NamedTuple):
    target: Target
    mutant: Mutant | None
    code: int
    wall: float
    cpu: float
    log: str


def run(tasks: list[tuple[Target, Mutant | None, Seconds]], jobs: int) -> Iterator[Done]:
    """Run the tests for each task, `jobs` at once, and hand out the results as they come."""
    waiting, running = tasks[::-1], dict[int, Any]()
    with tempfile.TemporaryDirectory() as parent:
        free = [Path(parent, str(slot)) for slot in range(jobs)]
        try:
            while waiting or running:
                while waiting and free:
                    target, mutant, limit = waiting.pop()
                    folder = free.pop()
                    running[start(target, mutant, folder, limit)] = target, mutant, folder, time.monotonic()
                pid, status, used = os.wait4(-1, 0)
                target, mutant, folder, began = running.pop(pid)
                free.append(folder)
                log = folder.with_suffix(".log").read_text(errors="replace")
                code, wall = os.waitstatus_to_exitcode(status), time.monotonic() - began
                yield Done(target, mutant, code, wall, used.ru_utime + used.ru_stime, log)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def check(mutants: list[Mutant], jobs: int) -> bool:
    survivors = [mutant for mutant in mutants if mutant.explanation]
    to_run = [mutant for mutant in mutants if not mutant.explanation]
    targets = [target for target in TARGETS if any(mutant.target == target for mutant in to_run)]
    limits, cpu, killed, unexplained = {}, 0.0, collections.Counter[str](), 0
    print(f"{len(mutants)} mutants. First the tests of {len(targets)} files as they are ...", flush=True)
    try:
        for done in run([(target, None, Seconds(3600, 3600)) for target in targets], jobs):
            print(f"{done.target.path}: {done.cpu:.0f} s of CPU time", flush=True)
            if done.code:
                raise SystemExit(f"{done.log}\nThese tests fail, or there are none, without any mutation.")
            limits[done.target] = Seconds(60 + 5 * done.wall, 60 + 5 * int(done.cpu))
            cpu += done.cpu
        for done in run([(mutant.target, mutant, limits[mutant.target]) for mutant in to_run], jobs):
            assert done.mutant is not None
            cpu += done.cpu
            killed[done.target.path] += bool(done.code)
            if not done.code:
                survivors.append(done.mutant)
                unexplained += 1
                print(f"survived: {done.mutant}", flush=True)
            if (count := killed.total() + unexplained) % 25 == 0:
                print(f"{count} of {len(to_run)}: {killed.total()} killed, {cpu:.0f} s of CPU time", flush=True)
    except KeyboardInterrupt:
        print("Interrupted. So far:")
    print()
    for mutant in survivors:
        print(f"survived: {mutant}\n    {mutant.explanation or 'NOT EXPLAINED'}")
    for target in TARGETS:
        alive = sum(mutant.target == target for mutant in survivors)
        if count := killed[target.path] + alive:
            print(f"{target.path}: {killed[target.path]} of {count} killed")
    run_or_known = killed.total() + len(survivors)
    rate = killed.total() / max(run_or_known, 1)
    print(f"{killed.total()} of {run_or_known} mutants killed: {rate:.1%}, in {cpu:.0f} s of CPU time")
    return rate >= REQUIRED and not unexplained and run_or_known == len(mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="mutants whose description matches")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    given = parser.parse_args()
    mutants = [mutant for target in TARGETS for mutant in mutants_of(target)]
    found = {(mutant.target.path, mutant.source, mutant.change) for mutant in mutants}
    for gone in {(path, *change) for path, changes in EXPLAINED.items() for change in changes} - found:
        print("EXPLAINED names a mutant that there is no more:", *gone, sep="\n    ")
    mutants = [mutant for mutant in mutants if re.search(given.only, str(mutant))]
    if given.sample is not None:
        mutants = random.Random(given.seed).sample(mutants, min(given.sample, len(mutants)))
    if given.list:
        print(*mutants, sep="\n")
        return 0
    prepare()
    return 0 if check(mutants, given.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
