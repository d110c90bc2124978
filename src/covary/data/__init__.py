"""Data: federated stores, partitions and data sets."""
