"""SCAFFOLD in one file: Algorithm 1 of the paper, line by line, in plain NumPy loops.

Run it: python examples/scaffold_one_file.py
covary's tests compare the compiled engine with `scaffold` below.
"""

import numpy as np


def scaffold(grads, x, cohorts, K, eta_l, eta_g=1.0, option="II"):
    """Algorithm 1 with full-batch gradients.

    grads:   one function per client, grads[i](y) = gradient of f_i at y
    x:       the initial server model
    cohorts: one list of sampled clients per round
    Returns the server model x, the server's control variate c, and the clients' c_i as rows.
    """
    N = len(grads)
    c = np.zeros_like(x)  # line 1: the server's control variate
    c_i = np.zeros((N, *x.shape))  # line 2: each client's control variate
    for S in cohorts:  # lines 3-5: each round, x and c go to the sampled clients
        sum_dy, sum_dc = np.zeros_like(x), np.zeros_like(x)
        for i in S:  # line 6: on client i
            y = x.copy()  # line 7
            for _ in range(K):  # line 8
                g = grads[i](y)  # line 9
                y = y - eta_l * (g - c_i[i] + c)  # line 10: the local step, corrected for drift
            if option == "I":  # line 12: the new control variate
                c_plus = grads[i](x)
            else:
                c_plus = c_i[i] - c + (x - y) / (K * eta_l)
            sum_dy += y - x  # line 13: the client sends the change of its model
            sum_dc += c_plus - c_i[i]  #          and the change of its control variate
            c_i[i] = c_plus  # line 14
        dx, dc = sum_dy / len(S), sum_dc / len(S)  # line 16
        x = x + eta_g * dx  # line 17
        c = c + len(S) / N * dc  #          N, not |S|, so that c stays the mean of ALL c_i
    return x, c, c_i


def fedavg(grads, x, cohorts, K, eta_l):
    """FedAvg, for comparison: the same without control variates."""
    for S in cohorts:
        ends = []
        for i in S:
            y = x.copy()
            for _ in range(K):
                y = y - eta_l * grads[i](y)
            ends.append(y)
        x = np.mean(ends, axis=0)
    return x


if __name__ == "__main__":
    print("Two clients, f_1(x) = x² + G x and f_2(x) = -G x: the optimum of their mean is x = 0. 20 rounds, K = 10.")
    for G in (1.0, 10.0, 100.0):
        clients = [lambda y, G=G: 2 * y + G, lambda y, G=G: -G + 0 * y]
        rounds = [[0, 1]] * 20
        drifted = fedavg(clients, np.ones(1), rounds, K=10, eta_l=0.1)
        x, c, c_i = scaffold(clients, np.ones(1), rounds, K=10, eta_l=0.1)
        print(f"G = {G:5.0f}   FedAvg ends at x = {drifted[0]:8.3f}   SCAFFOLD at x = {x[0]:10.2e}")
