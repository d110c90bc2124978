"""Run as one of several processes by test_engine: a simulation over the devices of them all, saved by each."""

from __future__ import annotations

import sys
import time

import jax
import numpy as np

import covary as cv

if __name__ == "__main__":
    address, count, index, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=count, process_id=index)
    from helpers import small_logistic

    clock = time.perf_counter
    time.perf_counter = lambda: clock() * (1 + 99 * index)  # no two hosts take the same time over anything

    problem = small_logistic([12, 8, 9, 15, 7, 11, 10])
    run = cv.simulate(cv.scaffold(eta_l=0.1), problem, 12, clients_per_round=5, local_steps=4, batch_size=4)
    np.savez(out, x=run.x, c=run.server.c, c_i=run.clients.c_i, loss=run.history["loss"], cohort=run.history["cohort"])
